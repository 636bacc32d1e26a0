"""Tiles: the fewest that cover what a pair of ranks sees, and how one is cut. (fast tier)"""

from dataclasses import replace

import pytest
import torch

from megatron_burst.plans.schedules.tiles import Tiling, half_and_quarters
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.interval import Interval, union_of
from megatron_burst.plans.visibility.layout import contiguous, zigzag
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.masks import times_seen
from tests.plans.simulator import Tile, blocks_of, tiles_of

HALF, WHOLE = Interval(0, 4), Interval(0, 8)
LATE_HALF = Interval(4, 8)


@pytest.mark.parametrize(
    ("query_owner", "key_owner", "expected"),
    [
        (1, 1, (WHOLE, WHOLE, Band.CAUSAL)),  # both chunks: one square in local rows
        (2, 1, (WHOLE, HALF, Band.FULL)),  # an earlier rank's early chunk, seen by all
        (1, 2, (LATE_HALF, WHOLE, Band.FULL)),  # a later rank's chunks, by the late half
    ],
)
def test_under_zigzag_a_pair_of_ranks_has_one_tile(
    query_owner: int, key_owner: int, expected: tuple[Interval, Interval, Band]
) -> None:
    found = Tiling(zigzag(32, 4), Mask.causal())(query_owner, key_owner)
    assert tiles_of(found) == [Tile(query_owner, key_owner, *expected)]


def test_what_is_not_seen_has_no_tile_and_what_is_seen_whole_has_one() -> None:
    layout = contiguous(32, 4)
    assert len(Tiling(layout, Mask.causal())(0, 1)) == 0
    whole = Tile(0, 1, WHOLE, WHOLE, Band.FULL)
    assert tiles_of(Tiling(layout, Mask.full())(0, 1)) == [whole]
    assert tiles_of(Tiling(zigzag(32, 4), Mask.full())(0, 1)) == [whole]


@pytest.mark.parametrize("begin", range(1, 32))
def test_a_document_may_begin_at_any_row(begin: int) -> None:
    """Also at the last one of a chunk."""
    tiling = Tiling(zigzag(32, 4), Mask.causal(documents=(0, begin, 32)))
    pairs = sum(t.pairs for q in range(4) for k in range(4) for t in tiles_of(tiling(q, k)))
    assert pairs == sum(n * (n + 1) // 2 for n in (begin, 32 - begin))


def test_a_window_that_hides_nothing_is_none() -> None:
    """So documents that are each in zigzag are planned at once, and a whole sequence is dense."""
    packed, whole = Mask.causal(documents=(0, 16, 40, 64)), Mask.full()
    for mask, window in ((packed, 23), (whole, 63)):
        assert Tiling(zigzag(64, 4), replace(mask, window=window)).mask == mask
        narrow = replace(mask, window=window - 1)
        assert Tiling(zigzag(64, 4), narrow).mask == narrow


def test_rows_that_touch_or_overlap_are_sent_as_one() -> None:
    given = [Interval(4, 7), Interval(0, 2), Interval(2, 4), Interval(9, 10), Interval(5, 6)]
    assert union_of(given) == [Interval(0, 7), Interval(9, 10)]


CAUSAL = [(n, n, Band.CAUSAL) for n in (1, 2, 3, 4, 5, 7, 8, 33)]
FULL = [(n, keys, Band.FULL) for n in (1, 2, 3, 4, 5, 7, 8, 33) for keys in (1, 6)]


@pytest.mark.parametrize(("rows", "keys", "band"), CAUSAL + FULL)
def test_a_half_and_two_quarters_are_the_tile(rows: int, keys: int, band: Band) -> None:
    tile = Tile(3, 5, Interval(10, 10 + rows), Interval(20, 20 + keys), band)
    parts = half_and_quarters(*blocks_of([tile]))
    assert all(len(part) <= 1 for part in parts)
    pieces = [tile for part in parts for tile in tiles_of(part)]
    assert {(piece.query_owner, piece.key_owner) for piece in pieces} == {(3, 5)}
    assert torch.equal(times_seen(pieces, 60), times_seen([tile], 60))
    assert sum(piece.pairs for piece in pieces) == tile.pairs
    for piece in pieces:
        assert piece.query_rows.length and piece.key_rows.length
        if piece.band == Band.CAUSAL:
            assert piece.query_rows.length == piece.key_rows.length
    if rows >= 4:
        assert all(map(len, parts))
    if rows >= 8:
        shares = [int(part.cells.pairs.sum()) / tile.pairs for part in parts]
        assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.08)
