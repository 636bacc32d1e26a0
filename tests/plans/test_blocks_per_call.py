"""Rings whose kernel calls take several key blocks: their plans, calls and costs. (fast tier)"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_burst import BurstConfig
from megatron_burst.config import GradientReturn
from megatron_burst.plans.calls import calls_of
from megatron_burst.plans.cost import LatentShape, Shape, traffic
from megatron_burst.plans.layout import Layout, contiguous, segmented_zigzag, striped, zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.planning import choose
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid, flat_grid
from tests.plans.simulator import simulate

N = 16  # tokens of a rank
PLACES = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 8), (4, 2), (8, 4), (8, 2), (9, 3), (3, 1)]
both_passes = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def grid_of(ranks: int, on_a_node: int) -> Grid:
    begins = range(0, ranks, on_a_node)
    return Grid(tuple(tuple(range(begin, begin + on_a_node)) for begin in begins))


def shape_of(tokens: int, heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape(tokens, heads, kv_heads, 128, 128, 2, 4, sends_raw=True)


def ring_of(tiling: Tiling, grid: Grid, blocks: int) -> Ring:
    return Ring(tiling, grid, gradient_return=GradientReturn.HOME, blocks_per_call=blocks)


def layouts(ranks: int) -> list[Layout]:
    return [zigzag(N * ranks, ranks), segmented_zigzag([N * ranks // 2] * 2, ranks)]


@both_passes
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_plans_are_right_send_no_byte_more_and_hold_no_more_than_they_say(
    place: tuple[int, int], backward: bool
) -> None:
    ranks, grid, sizes = place[0], grid_of(*place), shape_of(N).item_bytes(backward=backward)
    nodes = [rank // place[1] for rank in range(ranks)]
    for layout, mask in product(layouts(ranks), (Mask.causal(), Mask.full())):
        tiling = Tiling(layout, mask)
        usual = traffic(ring_of(tiling, grid, 1).messages(backward=backward), sizes, nodes, N)
        for blocks in (2, 3, 4):
            ring = ring_of(tiling, grid, blocks)
            plans = [ring.backward(r) if backward else ring.forward(r) for r in range(ranks)]
            simulate(plans, backward=backward, pairs=int(tiling.needs.pairs.sum()))
            assert traffic(ring.messages(backward=backward), sizes, nodes, N) == usual
            held = max(sum(sizes[kind] * n for kind, n in p.most_buffered.items()) for p in plans)
            assert held <= ring.memory(sizes, backward=backward)


@pytest.mark.parametrize(("blocks", "held"), [(1, 3), (2, 7), (4, 11)])
def test_single_blocks_do_not_take_the_buffers_of_several(blocks: int, held: int) -> None:
    ring = ring_of(Tiling(zigzag(N * 32, 32), Mask.causal()), grid_of(32, 8), blocks)
    assert ring.forward(16).most_buffered[Kind.KV] == held


@both_passes
def test_the_work_that_is_counted_is_that_of_the_calls(backward: bool) -> None:
    for (ranks, on_a_node), blocks in product([(8, 8), (8, 4), (5, 5)], (2, 4)):
        ring = ring_of(
            Tiling(zigzag(N * ranks, ranks), Mask.causal()), grid_of(ranks, on_a_node), blocks
        )
        work = ring.work(backward=backward)
        for rank in range(ranks):
            tiles = ring.tiles(rank, backward=backward)
            for step, some in tiles.items():
                calls = [
                    (*np.sum(call.lengths, axis=0), call.band)
                    for call in calls_of(some, joins=True)
                ]
                queries, keys = (sum(call[side] for call in calls) for side in (0, 1))
                assert work.query_rows[step, rank] == queries, (rank, step)
                assert work.key_rows[step, rank] == keys
                assert work.pairs[step, rank] == sum(tile.pairs for tile in some)


def test_a_call_takes_blocks_that_are_seen_alike() -> None:
    ring = ring_of(Tiling(zigzag(N * 8, 8), Mask.causal()), flat_grid(8), 2)
    plan = ring.forward(3)
    calls = [call for step in plan.steps for call in calls_of(step.tiles, joins=plan.chunk > 0)]
    found = [
        ([block.owner for block in call.tile.key_blocks], call.queries[0], call.keys[0])
        for call in calls
    ]
    every, late = (0, N), (N // 2, N)
    assert found == [
        ([3], every, every),
        ([2, 1], every, (0, N)),  # the first halves of both
        ([0], every, (0, N // 2)),
        ([7], late, every),  # a later rank: another call in the same step
        ([6, 5], late, (0, 2 * N)),
        ([4], late, every),
    ]


CAUSAL = Tiling(zigzag(8 * 1024, 8), Mask.causal())
NONE = {
    "a window": {"tiling": Tiling(CAUSAL.layout, Mask.causal(window=5000))},
    "documents": {"tiling": Tiling(CAUSAL.layout, Mask.causal(documents=(0, 5000, 8192)))},
    "a later stop": {"tiling": Tiling(CAUSAL.layout, replace(Mask.causal(), query_stop=4096))},
    "contiguous": {"tiling": Tiling(contiguous(8 * 1024, 8), Mask.causal())},
    "striped": {"tiling": Tiling(striped(8 * 1024, 8), Mask.causal())},
    "uneven pieces": {"tiling": Tiling(segmented_zigzag([16, 8176], 8), Mask.causal())},
    "two sequences": {"shape": shape_of(2048)},
    "latents": {"shape": Shape(1024, 32, 8, 128, 128, 2, 4, latents=LatentShape(576, 10**6))},
    "nodes of two": {"grid": grid_of(8, 2), "nodes": "aabbccdd"},
    "flat over nodes": {"topology": "flat", "nodes": "aaaabbbb"},
    "a baseline": {"algorithm": "ring", "blocks_per_call": None},
    "queries travel": {"backward": "query"},
    "gradients by a chain": {"gradient_return": "chain"},
}


@pytest.mark.parametrize("blocks", [None, 4])
@pytest.mark.parametrize("case", ["", *NONE])
def test_where_it_does_not_apply_it_is_one(case: str, blocks: int | None) -> None:
    given = {
        **{"tiling": CAUSAL, "grid": flat_grid(8), "nodes": "aaaaaaaa", "shape": shape_of(1024)},
        **{"backward": "kv", "blocks_per_call": blocks},
        **NONE.get(case, {}),
    }
    tiling, grid, nodes, shape = (given.pop(name) for name in ("tiling", "grid", "nodes", "shape"))
    choice = choose(BurstConfig(**given), tiling, grid, shape, nodes)
    forward, backward = (o[0].schedule for o in (choice.forward, choice.backward))
    found = [getattr(way, "blocks_per_call", 1) for way in (forward, backward)]
    only_backward = case in ("queries travel", "gradients by a chain")
    assert found == [4 if only_backward or not case else 1, 1 if case else 4]
    assert ("kv ring of 4 blocks a call" in str(choice)) == (4 in found)


def test_large_tiles_and_little_memory_leave_it_at_one() -> None:
    def chosen(tokens: int, kv_heads: int = 8, limit: float = float("inf")) -> int:
        tiling = Tiling(zigzag(8 * tokens, 8), Mask.causal())
        given = tiling, flat_grid(8), shape_of(tokens, kv_heads=kv_heads), [0] * 8
        choice = choose(BurstConfig(backward="kv"), *given, memory_limit=limit)
        schedule = choice.forward[0].schedule
        assert isinstance(schedule, Ring)
        return schedule.blocks_per_call

    assert [chosen(1024 * n) for n in (1, 4, 16, 64)] == [4, 4, 4, 1]
    block = shape_of(1024).item_bytes()["kv"]
    assert [chosen(1024, limit=n * block) for n in (7, 6, 5)] == [4, 2, 1]
    more_bytes = [chosen(1024 * n, kv_heads=32) for n in (1, 4, 16)]
    assert more_bytes == [1, 2, 4], "what is computed first does not hide them"
