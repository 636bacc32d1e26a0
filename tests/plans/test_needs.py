"""What a rank finds for itself is what planning all ranks, tile by tile, finds. (fast tier)"""

import itertools
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import meshes
from megatron_burst.plans.schedules.needs import part_of
from megatron_burst.plans.schedules.plan import Hop, Kind
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Messages, Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.interval import Interval, union_of
from megatron_burst.plans.visibility.layout import striped
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.masks import LAYOUTS, Masking, hard_maskings
from tests.plans.simulator import tiles_of
from tests.tier import some

CHUNK = 4
GRIDS = [
    Grid(((0,),)),
    Grid(((3, 0, 2, 1, 4),)),
    Grid(((0, 2, 4, 6), (1, 3, 5, 7))),
    Grid(((0,), (1,), (2,))),
    Grid(((0, 1, 2), (5, 4, 3))),
]
BLOCKS = Kind.KV, Kind.QUERY

A_ROW = {kind: n for n, kind in enumerate(Kind, start=1)}  # bytes


def tilings(ranks: int) -> list[Tiling]:
    masks = [*hard_maskings(ranks, CHUNK).values(), Masking(), Masking(False)]
    tokens = 2 * ranks * CHUNK
    layouts = [make(tokens, ranks) for name, make in LAYOUTS.items() if "segmented" not in name]
    return [Tiling(layout, m.mask) for layout, m in itertools.product(layouts, masks)]


def schedules(tiling: Tiling, grid: Grid) -> list[Schedule]:
    ways = itertools.product(BLOCKS, (True, False), (False, True))
    direct = [Direct(tiling, grid, kind) for kind in BLOCKS] if tiling.mask.is_sparse else []
    rings = [Ring(tiling, grid, *way) for way in ways]
    return [*rings, *direct, *(mesh for kind in BLOCKS for mesh in meshes(tiling, grid, kind))]


def test_as_many_kinds_as_a_byte_counts() -> None:
    tokens, ranks = 254, 127  # striped: 253 distances, and three kinds beside them
    needs = Tiling(striped(tokens, ranks), Mask.causal()).needs
    assert needs.pairs.sum() == tokens * (tokens + 1) // 2


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_needs_are_those_of_the_tiles(grid: Grid) -> None:
    ranks = range(grid.ranks)
    for tiling in tilings(grid.ranks):
        needs = tiling.needs
        computed = [sum(int(tiling(q, k).cells.pairs.sum()) for k in ranks) for q in ranks]
        assert np.array_equal(needs.pairs.sum(axis=1), computed)
        assert needs.is_banded == any(
            t.band.is_banded(t.query_rows.length, t.key_rows.length)
            for q in ranks
            for k in ranks
            for t in tiles_of(tiling(q, k))
        )
        for kind, owner in itertools.product(BLOCKS, ranks):
            others: list[Interval] = []
            for user in ranks:
                tiles = tiling.of_block(kind, owner, user)
                rows = tiles.rows_of(kind)
                others += rows if user != owner else []
                assert bool(len(tiles)) == bool(needs.users(kind)[owner, user]) or user == owner
                each, union = (sum(r.length for r in some) for some in (rows, union_of(rows)))
                assert needs.once[kind][owner, user] == (each == union or user == owner)
                if tiling.mask.is_sparse:
                    expected = sum(part.length for part in union_of(rows))
                    assert needs.rows[kind][owner, user] == expected, (tiling.mask, kind)
            if tiling.mask.is_sparse and others:
                start, stop = min(r.start for r in others), max(r.stop for r in others)
                part = () if stop - start == tiling.local_tokens else (Interval(start, stop),)
                assert part_of(needs.parts[kind][owner]) == part
            else:
                assert part_of(needs.parts[kind][owner]) == ()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_rank_finds_its_own_messages_and_what_all_send_and_compute(grid: Grid) -> None:
    for number, tiling in enumerate(some(tilings(grid.ranks), 5, grid.ranks % 5)):
        for schedule in some(schedules(tiling, grid), 3, number % 3):
            for backward in (False, True):
                by_tiles = work_of_tiles(schedule, backward)
                for found, each in zip(schedule.work(backward=backward), by_tiles, strict=True):
                    assert np.array_equal(found[: len(each)], each) and not found[len(each) :].any()
            every = (m for b in (False, True) for m in schedule.messages(backward=b))
            for messages in every:
                hops = messages.hops()
                for rank in range(grid.ranks):
                    ours = [hop for hop in hops if rank in (hop.source, hop.target)]
                    assert messages.hops(rank) == ours, (schedule, rank)
                sizes = {kind: n * tiling.local_tokens for kind, n in A_ROW.items()}
                for summed in (False, True):
                    assert loads(messages, sizes, tiling, summed) == counted(hops, tiling)


def work_of_tiles(schedule: Schedule, backward: bool) -> NDArray[np.int64]:
    """Count them rank by rank: pairs, rows of queries and of keys, visitors; [4, step, rank]."""
    every = [schedule.tiles(rank, backward=backward) for rank in range(schedule.tiling.ranks)]
    found = np.zeros((4, 1 + max(step for tiles in every for step in tiles), len(every)), np.int64)
    for rank, tiles in enumerate(every):
        last = rank
        for step in sorted(tiles):
            blocks = [block for block in tiles[step] if len(block)]
            for cells in (block.cells for block in blocks):
                found[:3, step, rank] += cells.pairs.sum(), *cells.sizes.sum(axis=0)
            visitors = [*dict.fromkeys(b.query_owner for b in blocks if b.query_owner != rank)]
            found[3, step, rank] = sum(a != b for a, b in pairwise([last, *visitors]))
            last = [last, *visitors][-1]
    return found


def loads(
    messages: Messages, sizes: dict[Kind, int], tiling: Tiling, summed: bool
) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    given = messages.loads(sizes, tiling.local_tokens, summed=summed)
    assert len(given.leaves) == len(given.lands) == len(given.sizes)
    for ends_and_size in zip(*map(np.ravel, given[:3]), strict=True):
        source, target, size = map(int, ends_and_size)
        found[source, target] += size
    return +found


def counted(hops: list[Hop], tiling: Tiling) -> Counter[tuple[int, int]]:
    found: Counter[tuple[int, int]] = Counter()
    for hop in hops:
        rows = hop.item.packed
        length = rows.length if rows else tiling.local_tokens
        found[hop.source, hop.target] += A_ROW[hop.item.kind] * length
    return found
