"""Which tiles share a kernel call: every pair once, no row twice, few calls. (fast tier)"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst.plans.schedules.batches import TileBatch, batches_of
from megatron_burst.plans.schedules.plan import Tiles
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling, half_and_quarters
from megatron_burst.plans.schedules.topology import flat_grid
from megatron_burst.plans.visibility import cells
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.cells import Cell, Cells
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.layout import segmented_zigzag, zigzag, zigzag_of_each
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.masks import LAYOUTS, documents_of, maskings, times_seen
from tests.plans.simulator import Tile, blocks_of, tiles_of
from tests.tier import examples


def rows_of(intervals: Iterable[Interval]) -> Tensor:
    return torch.cat([torch.arange(*interval) for interval in intervals])


def computed(calls: Iterable[TileBatch], tokens: int) -> Tensor:
    """How often each pair of rows is computed, by what a kernel is told."""
    count = torch.zeros(tokens, tokens, dtype=torch.int)
    for call in calls:
        queries, keys = rows_of(call.queries), rows_of(call.keys)
        for of_side in (queries, keys):
            assert len(of_side.unique()) == len(of_side), "a row is written twice"
        q = k = 0
        longest = max(width for _, width in call.lengths)
        for height, width in call.lengths:
            seen = call.band.visible if len(call.lengths) == 1 else partial(from_corner, call.band)
            some = queries[q : q + height, None], keys[k : k + width]
            pairs = torch.as_tensor(seen(height, width))
            window = call.band.window(height, width) if len(call.lengths) == 1 else call.band
            assert torch.equal(by_flash_2(window, height, width, longest), pairs), "hides pairs"
            count[some] += pairs
            q, k = q + height, k + width
        assert (q, k) == (len(queries), len(keys))
    return count


def from_corner(band: Band, queries: int, keys: int) -> Tensor:
    """A window as FlashAttention counts it."""
    distance = torch.arange(keys) - keys - (torch.arange(queries)[:, None] - queries)
    left, right = (10**6 if side is None else side for side in (band.left, band.right))
    return (distance >= -left) & (distance <= right)


def by_flash_2(window: Band | tuple[int | None, int | None], queries: int, keys: int, longest: int):
    """Such a window as FlashAttention-2 has it: no limit, beside one, is as far as keys go."""
    sides = (window.left, window.right) if isinstance(window, Band) else window
    sides = [None if side is None or side >= longest else side for side in sides]
    if sides != [None, None]:
        sides = [longest if side is None else side for side in sides]
    return from_corner(Band(*sides), queries, keys)


@examples(200)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 6),
    layout=st.sampled_from([*LAYOUTS]),
    data=st.data(),
)
def test_the_calls_compute_the_tiles(
    ranks: int, chunk: int, layout: str, data: st.DataObject
) -> None:
    tokens = 4 * ranks * chunk
    tiling = Tiling(LAYOUTS[layout](tokens, ranks), data.draw(maskings(tokens)).mask)
    for key_owner in range(ranks):
        tiles = tiling(0, key_owner)
        steps = [tiles]
        if key_owner == 0:
            half, end = steps[1:] = in_two(tiles)
            expected = times_seen(tiles_of(tiles), 4 * chunk)
            both = [*tiles_of(half), *tiles_of(end)]
            assert torch.equal(times_seen(both, 4 * chunk), expected)
        for some in steps:
            expected = times_seen(tiles_of(some), 4 * chunk)
            assert torch.equal(computed(batches_of([some]), 4 * chunk), expected)


@pytest.mark.parametrize("ends", [(30, 60, 125, 180), (86,), (81,)], ids=str)
@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_2_hides_nothing_of_documents_that_begin_within_a_window_of_a_border(
    ends: tuple[int, ...], is_causal: bool
) -> None:
    tokens, make = 64, Mask.causal if is_causal else Mask.full
    tiling = Tiling(zigzag(4 * tokens, 4), make(window=20, documents=(0, *ends, 256)))
    for query_owner, key_owner in itertools.product(range(4), repeat=2):
        tiles = tiling(query_owner, key_owner)
        made = computed(batches_of([tiles]), tokens)
        assert torch.equal(made, times_seen(tiles_of(tiles), tokens))


@examples(300)
@given(
    queries=st.integers(1, 40), keys=st.integers(1, 12), sides=st.tuples(*[st.integers(0, 40)] * 2)
)
def test_flash_2_hides_nothing_of_a_tall_tile(
    queries: int, keys: int, sides: tuple[int, int]
) -> None:
    of_band = Band(*sides).cut(Interval(0, queries), Interval(0, keys))
    assert of_band is not None, "the first query sees the first key"
    q, k, band = of_band
    tiles = Tiles(*(0, 0), Cells.of([Cell(q, k, band)]))
    assert torch.equal(computed(batches_of([tiles]), 40), times_seen(tiles_of(tiles), 40))


def in_two(tiles: Tiles) -> tuple[Tiles, Tiles]:
    half, *quarters = half_and_quarters(tiles)
    return half, tiles.having(Cells.concatenate([quarter.cells for quarter in quarters]))


def documents(tokens: int, count: int, seed: int = 0) -> tuple[int, ...]:
    cuts = random.Random(seed).sample(range(1, tokens), count - 1)
    return (0, *sorted(cuts), tokens)


@pytest.mark.parametrize("window", [None, 40])
def test_a_thousand_documents_take_two_calls_forward_and_three_backward(window: int | None) -> None:
    ranks, tokens = 8, 64 * 1024
    tiling = Tiling(
        zigzag(tokens, ranks), Mask.causal(window=window, documents=documents(tokens, 1000))
    )
    most: Counter[str] = Counter()
    for rank in range(ranks):
        half, end = in_two(own := tiling(rank, rank))
        steps = {"own": own, "half": half, "end": end}
        others = (tiling(rank, other) for other in range(ranks) if other != rank)
        found = {name: len(batches_of([tiles])) for name, tiles in steps.items()}
        found["visit"] = max(len(batches_of([tiles])) for tiles in others)
        most |= Counter(found)
    assert most["own"] <= (2 if window is None else 3) and most["visit"] <= 2
    assert most["half"] <= 3 and most["end"] <= 3


def test_ranks_that_see_alike_share_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So 500 documents, each in zigzag by itself, on 64 ranks are planned without their tiles."""
    ranks, lengths = 64, [128 * n for n in random.Random(0).choices(range(1, 40), k=500)]
    mask, known = Mask.causal(documents=documents_of(lengths)), dict[Any, Any]()
    ring, made = Ring(Tiling(zigzag_of_each(lengths, ranks), mask), flat_grid(ranks)), []
    make = cells._cell
    monkeypatch.setattr(cells, "_cell", lambda *cell: made.append(cell) or make(*cell))
    steps = [
        block
        for plan in (ring.forward(9), ring.backward(9))
        for step in plan.steps
        for block in step.blocks
    ]
    calls = [call for tiles in steps for call in batches_of([tiles], known)]
    assert sum(map(len, steps)) > 60_000 and len(made) < 1000
    assert len({id(call.lengths) for call in calls}) < 12
    for tiles in steps[:4]:
        (call,) = batches_of([tiles])
        shared = next(c for c in calls if c.tile == call.tile and c.band == call.band)
        assert (call.queries, call.keys, call.lengths) == (
            *(shared.queries, shared.keys),
            shared.lengths,
        )


def test_documents_on_their_own_rank_are_causal_squares_of_one_slice() -> None:
    """One that lies in two chunks of a rank, with others between them or not, is one of them."""
    tiles = Tiling(zigzag(64, 4), Mask.causal(documents=(0, 3, 60, 64)))(0, 0)
    assert [(*cell.queries, cell.band) for cell in tiles.cells] == [
        (0, 3, Band.CAUSAL),
        (3, 12, Band.CAUSAL),
        (12, 16, Band.CAUSAL),
    ]
    (call,) = batches_of([tiles])
    assert call.queries == call.keys == (Interval(0, 16),)
    assert call.lengths == ((3, 3), (9, 9), (4, 4)) and call.band == Band.CAUSAL


def test_short_documents_under_a_window_go_with_the_long_ones() -> None:
    mask = Mask.causal(window=5, documents=documents_of([3, 8, 1, 6, 12, 2]))
    tiles = Tiling(zigzag(32, 1), mask)(0, 0)
    assert len({cell.band for cell in tiles.cells}) == 3
    (call,) = batches_of([tiles])
    assert call.band == Band(5, 0) and len(call.lengths) == 6


def test_blocks_that_see_the_same_are_one_sequence() -> None:
    """Each block sees itself and the first: as many tiles as blocks, and two calls."""
    table = torch.eye(8, dtype=torch.bool)
    table[:, 0] = True
    tiles = Tiling(zigzag(64, 1), Mask.causal(block_table=table))(0, 0)
    assert len(tiles) == 13
    squares, full = batches_of([tiles])
    assert squares.queries == (Interval(0, 64),) and squares.band == Band.CAUSAL
    assert (full.queries, full.keys) == ((Interval(16, 64),), (Interval(0, 8),))


def test_runs_of_keys_are_one_sequence() -> None:
    table = torch.zeros(8, 8, dtype=torch.bool)
    table[7, ::2] = True
    table[7, 7] = True
    tiles = Tiling(zigzag(64, 1), Mask.full(block_table=table))(0, 0)
    assert len(tiles) == 4
    (call,) = batches_of([tiles])
    assert call.lengths == ((8, 40),)
    assert call.keys == (Interval(0, 8), Interval(16, 24), Interval(32, 40), Interval(48, 64))


def test_what_overlaps_goes_to_a_further_call() -> None:
    """Three chunks of a document see more and more of another rank's chunks."""
    tiles = Tiling(segmented_zigzag([16] * 4, 2), Mask.causal())(1, 0)
    calls = batches_of([tiles])
    assert len(tiles) > 2 and 1 < len(calls) <= len(tiles)


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_or_two_tiles_stay_calls_of_their_own(ranks: int) -> None:
    tiling = Tiling(zigzag(64, ranks), Mask.causal())
    for tiles in (tiling(0, 0), tiling(0, ranks - 1), *in_two(tiling(0, 0))):
        calls = batches_of([tiles])
        found = [(call.queries, call.keys, call.band) for call in calls]
        assert found == [((queries,), (keys,), band) for queries, keys, band in tiles.cells]
        assert all(len(call.lengths) == 1 for call in calls)


def test_tiles_of_different_blocks_share_no_call() -> None:
    full = [
        Tile(0, owner, Interval(i, i + 1), Interval(i, i + 1), Band.FULL)
        for i in range(4)
        for owner in (1, 2)
    ]
    assert [call.tile.key_owner for call in batches_of(blocks_of(full))] == [1, 2]


@pytest.mark.parametrize(
    "lengths", [[64] * 16, [700, 100, 224], [100, 900, 24], [5] * 200 + [24], [64] * 69]
)
def test_several_tiles_are_shared_out_by_whole_ones(lengths: list[int]) -> None:
    tokens = sum(lengths)
    tiles = Tiling(zigzag(tokens, 1), Mask.causal(documents=documents_of(lengths)))(0, 0)
    parts = half_and_quarters(tiles)
    total = tiles.cells.pairs.sum()
    shares = [part.cells.pairs.sum() / total for part in parts]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.008)
    pieces = [tile for part in parts for tile in tiles_of(part)]
    cut = len(pieces) - len(tiles)
    assert cut <= 4  # two borders, and what is full left of the causal squares behind them
    assert torch.equal(times_seen(pieces, tokens), times_seen(tiles_of(tiles), tokens))
    assert not any(some.cells.is_banded for some in parts)
