"""Masks and tiles against the same mask written out as a matrix of booleans. (fast tier)"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst.plans.choice.cost import visible_pairs
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.tiles import Tiling, half_and_quarters
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.interval import Interval, union_of
from megatron_burst.plans.visibility.layout import (
    Layout,
    segmented_zigzag,
    striped,
    zigzag,
    zigzag_of_each,
)
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.masks import (
    LAYOUTS,
    Masking,
    documents_of,
    hard_maskings,
    maskings,
    times_seen,
)
from tests.plans.simulator import Tile, blocks_of, tiles_of
from tests.tier import examples


def assert_fits(tile: Tile) -> None:
    """No kernel is asked for a row that sees nothing, or for keys that nobody sees."""
    visible = tile.band.visible(tile.query_rows.length, tile.key_rows.length)
    assert visible.any(0).all() and visible.any(1).all()
    assert tile.pairs == int(visible.sum())
    limits = tile.band.window(tile.query_rows.length, tile.key_rows.length)
    assert all(limit is None or limit >= 0 for limit in limits)
    assert (tile.band == Band.FULL) == bool(visible.all())


def check(layout: Layout, masking: Masking) -> None:
    tiling, visible = Tiling(layout, masking.mask), masking.visible(layout.tokens)
    for query_owner, key_owner in itertools.product(range(layout.ranks), repeat=2):
        tiles = tiles_of(tiling(query_owner, key_owner))
        found = times_seen(tiles, layout.local_tokens)
        rows, columns = layout.positions(query_owner), layout.positions(key_owner)
        assert torch.equal(found, visible[rows][:, columns].int())
        for tile in tiles:
            assert_fits(tile)
        pair = query_owner, key_owner
        for kind, owner_and_user in ((Kind.KV, pair[::-1]), (Kind.QUERY, pair)):
            rows = [tile.rows_of(kind) for tile in tiles]
            each, union = (sum(row.length for row in some) for some in (rows, union_of(rows)))
            is_once = tiling.needs.once[kind][owner_and_user]
            assert is_once == (each == union or query_owner == key_owner)


@pytest.mark.parametrize("layout", LAYOUTS)
@examples(120)
@given(ranks=st.integers(1, 5), chunk=st.integers(1, 4), data=st.data())
def test_tiles_cover_what_is_seen_once(
    layout: str, ranks: int, chunk: int, data: st.DataObject
) -> None:
    tokens = 4 * ranks * chunk
    check(LAYOUTS[layout](tokens, ranks), data.draw(maskings(tokens)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "chunk"), [(1, 4), (2, 1), (3, 2), (4, 6)])
def test_tiles_of_the_hard_masks(layout: str, ranks: int, chunk: int) -> None:
    for masking in hard_maskings(2 * ranks, chunk).values():
        check(LAYOUTS[layout](4 * ranks * chunk, ranks), masking)


def test_pieces_that_see_the_same_keys_but_not_all_of_both() -> None:
    """Random masks have found both: neighbours that were joined as if all their queries saw all."""
    table = tuple(
        tuple(map(bool, row)) for row in ((1, 0, 0, 0), (0, 1, 0, 0), *[(1, 0, 1, 0)] * 2)
    )
    check(striped(12, 2), Masking(table=table))  # query 6 does not see key 7, 8 and 10 do
    check(zigzag(12, 3), Masking(False, 1, (0, 1, 12)))  # query 2 sees key 1 and, as 8, 10 and 11


def test_keys_of_two_ranks_are_not_joined() -> None:
    """Block 1 sees the first half of one rank's keys and the second half of the next one's."""
    seen = {(1, 2), (1, 5)}
    table = tuple(tuple((row, column) in seen for column in range(6)) for row in range(6))
    check(LAYOUTS["contiguous"](12, 3), Masking(False, None, (0, 1, 12), table))


@examples(60)
@given(
    ranks=st.integers(1, 5),
    places=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    causal=st.booleans(),
    data=st.data(),
)
def test_documents_that_are_each_in_zigzag(
    ranks: int, places: list[int], causal: bool, data: st.DataObject
) -> None:
    """They are planned by formula; padding and a window cut some of their chunks."""
    tokens = [2 * ranks * place for place in places]
    layout, bounds = zigzag_of_each(tokens, ranks), documents_of(tokens)
    plain = segmented_zigzag(tokens, ranks)
    assert list(layout.shards) == list(plain.shards)
    assert layout.shards[:-1] == plain.shards[:-1] and layout.shards[-1] == plain.shards[-1]
    check(layout, Masking(causal, documents=bounds))
    assert hash(layout) == hash(zigzag_of_each(tokens, ranks))
    lengths = tuple(data.draw(st.integers(0, most)) for most in tokens)
    window = data.draw(st.none() | st.integers(0, max(tokens)))
    masking = Masking(causal, window, bounds, None, lengths)
    check(layout, masking)
    for seen in (Masking(causal, documents=bounds).mask, masking.mask):
        tilings = [Tiling(x, seen) for x in (layout, plain)]
        for pair in itertools.product(range(ranks), repeat=2):
            assert len(tilings[0](*pair)) <= len(tilings[1](*pair))
        one, other = (tiling.needs for tiling in tilings)
        assert np.array_equal(one.pairs, other.pairs) and one.is_banded == other.is_banded
        for name in ("parts", "rows", "ends"):
            assert all(
                np.array_equal(getattr(one, name)[k], x) for k, x in getattr(other, name).items()
            )


@pytest.mark.parametrize("window", [None, 1500])
def test_documents_in_zigzag_are_of_few_kinds(window: int | None) -> None:
    """Padded ones and those that a window cuts, too; pair by pair it were two million cells."""
    ranks, draw = 64, random.Random(0)
    tokens = [2 * ranks * draw.randrange(1, 40) for _ in range(300)]
    lengths = [most - draw.randrange(2 * ranks) for most in tokens]
    mask = Mask.causal(window=window, documents=documents_of(tokens), lengths=lengths)
    seen = Tiling(zigzag_of_each(tokens, ranks), mask).visible
    assert sum(len(part.cells) for part in seen.parts) < 10_000
    rows = seen.cells(9, 8).rows[:, 0]
    assert 290 < len(rows) <= 300 and (np.diff(rows) >= 0).all()


@pytest.mark.parametrize("documents", [(0, 3, 8, 16), (0, 5, 16), (0, 8, 12, 16)])
def test_a_layout_of_other_documents_than_the_masks(documents: tuple[int, ...]) -> None:
    lengths = tuple(max(1, b - a - 1) for a, b in itertools.pairwise(documents))
    for padded in (None, lengths):
        check(zigzag_of_each([8, 8], 2), Masking(True, 6, documents, None, padded))


def test_a_band_cut_is_the_submatrix_and_has_no_row_that_sees_nothing() -> None:
    """All bands on all rows and keys of up to three by four, as a submatrix of their masks."""
    limits = [None, *range(-4, 5)]
    rows, columns = (list(itertools.starmap(Interval, pairs(n))) for n in (3, 4))
    for left, right in itertools.product(limits, repeat=2):
        whole = Band(left, right).visible(3, 4).tolist()
        for queries, keys in itertools.product(rows, columns):
            seen = {(q, k) for q in range(*queries) for k in range(*keys) if whole[q][k]}
            cut = Band(left, right).cut(queries, keys)
            assert (cut is None) == (not seen)
            if cut:
                tile = Tile(0, 0, *cut)
                assert_fits(tile)
                assert {(int(q), int(k)) for q, k in times_seen([tile], 4).nonzero()} == seen
                for first in range(tile.query_rows.length + 1):  # rows of it
                    size = first, tile.key_rows.length
                    assert tile.band.pairs(*size) == tile.band.visible(*size).sum()


def pairs(length: int) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(length + 1), 2)


@examples(100)
@given(tokens=st.integers(1, 24), data=st.data())
def test_a_tile_and_its_parts_are_the_same_pairs(tokens: int, data: st.DataObject) -> None:
    layout = LAYOUTS["contiguous"](tokens, 1)
    for tile in tiles_of(Tiling(layout, data.draw(maskings(tokens)).mask)(0, 0)):
        parts = [t for part in half_and_quarters(*blocks_of([tile])) for t in tiles_of(part)]
        for part in parts:
            assert_fits(part)
        assert torch.equal(times_seen(parts, tokens), times_seen([tile], tokens))


@examples(100)
@given(tokens=st.integers(1, 30), data=st.data())
def test_pairs_counts_the_visible_pairs(tokens: int, data: st.DataObject) -> None:
    masking = data.draw(maskings(tokens))
    assert visible_pairs(masking.mask, tokens) == int(masking.visible(tokens).sum())


def test_no_window_costs_as_much_as_the_sequence() -> None:
    """A megatoken is planned at once, because nothing grows with the tokens."""
    assert visible_pairs(Mask.causal(), 2**20) == 2**19 * (2**20 + 1)
    assert visible_pairs(Mask.causal(window=1023), 2**20) == 2**20 * 1024 - 1023 * 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": -1}, "window of -1 positions is negative"),
        ({"documents": [0]}, r"grow from 0 to the end of the sequence, got \(0,\)"),
        ({"documents": [1, 4]}, r"got \(1, 4\)"),
        ({"documents": [0, 4, 4]}, r"got \(0, 4, 4\)"),
        ({"documents": [0, 4, 8], "lengths": [4, 5]}, r"of \[4, 4\] tokens, cannot be of \[4, 5\]"),
        ({"documents": [0, 8], "lengths": [4, 4]}, "1 documents with padding"),
        ({"lengths": [4]}, "0 documents with padding"),
        ({"block_table": torch.ones(2, 3, dtype=torch.bool)}, r"got \(2, 3\) of torch.bool"),
        ({"block_table": torch.ones(0, 0, dtype=torch.bool)}, r"at least 1 x 1, got \(0, 0\)"),
        ({"block_table": torch.ones(2, 2)}, r"got \(2, 2\) of torch.float32"),
    ],
)
def test_what_is_no_mask_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mask.causal(**arguments)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Mask.causal(documents=[0, 3, 7]), "documents end at 7, the sequence has 8 tokens"),
        (Mask.full(block_table=torch.ones(3, 3, dtype=torch.bool)), "8 tokens do not divide into"),
    ],
)
def test_a_mask_of_another_length_is_refused(mask: Mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tiling(LAYOUTS["zigzag"](8, 2), mask)


def test_tensors_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one the host would wait for a device as often as there are documents."""
    monkeypatch.setattr(torch.Tensor, "__int__", None)
    given = {"documents": [0, 3, 8], "lengths": [2, 5]}
    tensors = {name: torch.tensor(x, dtype=torch.int32) for name, x in given.items()}
    assert Mask.causal(**tensors) == Mask.causal(**given)


def test_masks_that_differ_have_other_names_and_digests() -> None:
    """Ranks compare masks by their names, and plans are kept under their digests."""
    tables = [torch.tensor(bits).view(2, 2) for bits in ([True] * 4, [True, False, True, True])]
    masks = [
        Mask.causal(),
        Mask.full(),
        Mask.causal(window=3),
        Mask.causal(documents=[0, 3, 8]),
        Mask.causal(documents=[0, 4, 8]),
        Mask.causal(documents=[0, 4, 8], lengths=[4, 3]),
        Mask.causal(documents=[0, 4, 7, 8]),
        Mask.causal(documents=[0, 4, 8], lengths=[4, 0]),
        *(Mask.causal(block_table=table) for table in tables),
        Mask.causal(documents=[0, 3, 8], block_table=tables[0]),
        replace(Mask.causal(documents=[0, 3, 8]), query_stop=4),
    ]
    assert len({*map(str, masks)}) == len({*masks}) == len(masks)
    same = [Mask.causal(documents=[0, 3, 8]) for _ in range(2)]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1]) and str(same[0]) == str(same[1])
    assert Mask.causal(documents=[0, 3, 8], lengths=[3, 5]) == Mask.causal(documents=[0, 3, 8])
    for table in (tables[0].numpy(), tables[0].tolist()):
        assert Mask.causal(block_table=table) == Mask.causal(block_table=tables[0])
    as_lists, as_tensors, as_arrays = (
        Mask.causal(window=make([4])[0], documents=make([0, 4, 8]), lengths=make([3, 4]))
        for make in (list, torch.tensor, np.array)
    )
    assert as_lists.digest == as_tensors.digest == as_arrays.digest
