"""Rings and meshes whose kernel calls take several key blocks. (fast tier; the largest slow)"""

from collections.abc import Iterator, Sequence
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
from megatron_burst.plans.mesh import Mesh, meshes
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.planning import Offer, choose
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid, flat_grid
from tests.plans.simulator import bytes_held, simulate
from tests.tier import slow_if

N = 16  # tokens of a rank
PLACES = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 8), (4, 2), (8, 4), (8, 2), (9, 3), (3, 1)]
PLACES += [(10, 1), (12, 3)]  # and with more nodes, or ranks
LARGE = [(12, 12), (16, 4), (24, 3), (30, 5)]
both_passes = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def grid_of(ranks: int, on_a_node: int) -> Grid:
    begins = range(0, ranks, on_a_node)
    return Grid(tuple(tuple(range(begin, begin + on_a_node)) for begin in begins))


def shape_of(tokens: int, heads: int = 32, kv_heads: int = 8) -> Shape:
    return Shape(tokens, heads, kv_heads, 128, 128, 2, 4, sends_raw=True)


def ring_of(tiling: Tiling, grid: Grid, blocks: int) -> Ring:
    return Ring(tiling, grid, gradient_return=GradientReturn.HOME, blocks_per_call=blocks)


def ways(tiling: Tiling, grid: Grid) -> Iterator[Ring | Mesh]:
    yield ring_of(tiling, grid, 1)
    yield from meshes(tiling, grid, Kind.KV)


def layouts(ranks: int) -> list[Layout]:
    return [zigzag(N * ranks, ranks), segmented_zigzag([N * ranks // 2] * 2, ranks)]


@both_passes
@pytest.mark.parametrize("place", slow_if(LARGE, PLACES), ids=str)
def test_plans_are_right_send_no_byte_more_and_hold_no_more_than_they_say(
    place: tuple[int, int], backward: bool
) -> None:
    ranks, grid, shape = place[0], grid_of(*place), shape_of(N, kv_heads=32)
    sizes = shape.item_bytes(backward=backward)
    nodes = [rank // place[1] for rank in range(ranks)]
    for layout, mask in product(layouts(ranks), (Mask.causal(), Mask.full())):
        tiling = Tiling(layout, mask)
        for usual, blocks in product(ways(tiling, grid), (2, 3, 4)):
            way = replace(usual, blocks_per_call=blocks)
            plans = [way.backward(r) if backward else way.forward(r) for r in range(ranks)]
            simulate(plans, backward=backward, pairs=int(tiling.needs.pairs.sum()))
            sent, before = (
                traffic(each.messages(backward=backward), sizes, nodes, N) for each in (way, usual)
            )
            assert sent == before
            most = max(bytes_held(plan, sizes, backward) for plan in plans)
            assert most <= way.memory(sizes, backward=backward)


@pytest.mark.parametrize(("blocks", "held"), [(1, (3, 5)), (2, (6, 6)), (4, (9, 6))])
def test_single_blocks_do_not_take_the_buffers_of_several(
    blocks: int, held: tuple[int, int]
) -> None:
    """Of a ring of 4 nodes x 8, and of a 4 x 2 mesh of 8 nodes x 4."""
    tiling = Tiling(zigzag(N * 32, 32), Mask.causal())
    for way, most in zip(
        (ring_of(tiling, grid_of(32, 8), blocks), Mesh(tiling, grid_of(32, 4), 4, Kind.KV, blocks)),
        held,
        strict=True,
    ):
        assert way.forward(16).most_buffered[Kind.KV] == most


def test_calls_of_few_blocks_take_no_room_that_those_of_more_could_have_had() -> None:
    """Of a node's 12 blocks one group of four is of earlier and later ranks, two calls."""
    ring = ring_of(Tiling(zigzag(2 * 24, 24), Mask.causal()), grid_of(24, 12), 4)
    most = max(ring.forward(rank).most_buffered[Kind.KV] for rank in range(24))
    assert most == 11 <= ring.memory(dict.fromkeys(Kind, 1), backward=False)


@both_passes
def test_the_work_that_is_counted_is_that_of_the_calls(backward: bool) -> None:
    places = [(8, 8), (8, 4), (5, 5), (12, 3)]
    tilings = {place: Tiling(zigzag(N * place[0], place[0]), Mask.causal()) for place in places}
    every = [way for place in places for way in ways(tilings[place], grid_of(*place))]
    for usual, blocks in product(every, (2, 4)):
        way = replace(usual, blocks_per_call=blocks)
        work = way.work(backward=backward)
        for rank in range(way.grid.ranks):
            tiles = way.tiles(rank, backward=backward)
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


def test_a_mesh_does_so_with_what_a_visitor_meets() -> None:
    """Rank 5 of 4 nodes x 4, rank 1 of node 1: in a 2 x 2 mesh its visitor is of node 0."""
    tiling = Tiling(zigzag(N * 16, 16), Mask.causal())
    plan = Mesh(tiling, grid_of(16, 4), 2, Kind.KV, 2).forward(5)
    calls = [call for step in plan.steps for call in calls_of(step.tiles, joins=plan.chunk > 0)]
    found = [(c.tile.query_owner, [block.owner for block in c.tile.key_blocks]) for c in calls]
    of_own = [(5, [5]), (5, [4]), (5, [7]), (5, [6])]
    visits = [(1, [5]), (1, [4, 7]), (1, [6]), (1, [13]), (1, [12, 15]), (1, [14])]
    assert found == [*of_own, *visits, (5, [13]), (5, [12, 15]), (5, [14])]


def test_where_each_rank_is_a_node_the_blocks_that_it_keeps_lie_side_by_side() -> None:
    plan = Mesh(Tiling(zigzag(N * 8, 8), Mask.causal()), flat_grid(8), 4, Kind.KV, 3).forward(1)
    calls = [call for step in plan.steps for call in calls_of(step.tiles, joins=plan.chunk > 0)]
    found = [(c.tile.query_owner, [block.owner for block in c.tile.key_blocks]) for c in calls]
    assert found == [(1, [1]), (0, [1]), (0, [7, 5, 3]), (1, [7, 5, 3])]
    assert plan.most_buffered[Kind.KV] == 3


CAUSAL = Tiling(zigzag(8 * 1024, 8), Mask.causal())
BACKWARDS = Layout(tuple(shard[::-1] for shard in zigzag(8 * 1024, 8).shards))
NONE = {
    "a window": {"tiling": Tiling(CAUSAL.layout, Mask.causal(window=5000))},
    "documents": {"tiling": Tiling(CAUSAL.layout, Mask.causal(documents=(0, 5000, 8192)))},
    "a later stop": {"tiling": Tiling(CAUSAL.layout, replace(Mask.causal(), query_stop=4096))},
    "contiguous": {"tiling": Tiling(contiguous(8 * 1024, 8), Mask.causal())},
    "striped": {"tiling": Tiling(striped(8 * 1024, 8), Mask.causal())},
    "not in order": {"tiling": Tiling(BACKWARDS, Mask.causal())},
    "uneven pieces": {"tiling": Tiling(segmented_zigzag([16, 8176], 8), Mask.causal())},
    "two sequences": {"shape": shape_of(2048)},
    "latents": {"shape": Shape(1024, 32, 8, 128, 128, 2, 4, latents=LatentShape(576, 10**6))},
    "nodes of two": {"grid": grid_of(8, 2), "nodes": "aabbccdd"},
    "flat over nodes": {"topology": "flat", "nodes": "aaaabbbb"},
    "a baseline": {"algorithm": "ring", "blocks_per_call": None},
    "queries travel": {"backward": "query"},
    "gradients by a chain": {"gradient_return": "chain"},
}

WHY = {
    "two sequences": "a batch has several sequences",
    "latents": "latents travel",
    "nodes of two": "fewer than three ranks share a node",
    "queries travel": "queries go around",
    "flat over nodes": "blocks or gradients go from rank to rank",
    "gradients by a chain": "blocks or gradients go from rank to rank",
}  # of the others: the mask or the layout


@pytest.mark.parametrize("blocks", [None, 4])
@pytest.mark.parametrize("case", ["", *NONE])
def test_where_it_does_not_apply_it_is_one(case: str, blocks: int | None) -> None:
    given = {
        **{"tiling": CAUSAL, "grid": flat_grid(8), "nodes": "aaaaaaaa", "shape": shape_of(1024)},
        **{"backward": "kv", "blocks_per_call": blocks},
        **NONE.get(case, {}),
    }
    tiling, grid, nodes, shape = (given.pop(name) for name in ("tiling", "grid", "nodes", "shape"))
    config = BurstConfig(**given)
    choice = choose(config, tiling, grid, shape, nodes)
    forward, backward = (o[0].schedule for o in (choice.forward, choice.backward))
    found = [getattr(way, "blocks_per_call", 1) for way in (forward, backward)]
    only_backward = case in ("queries travel", "gradients by a chain")
    assert found == [4 if only_backward or not case else 1, 1 if case else 4]
    assert ("kv ring of 4 blocks a call" in str(choice)) == (4 in found)
    why = WHY.get(case, "under this mask and layout blocks are seen in part")
    for name, number in zip(("forward", "backward"), found, strict=True):
        is_said = f"; 1 block a call {name}, not 4: {why}" in str(choice)
        assert is_said == (config.blocks_per_call == 4 and number == 1)


NO_MESH = {
    "a window": {"tiling": Tiling(zigzag(8 * 1024, 16), Mask.causal(window=5000))},
    "striped": {"tiling": Tiling(striped(8 * 1024, 16), Mask.causal())},
    "two sequences": {"shape": shape_of(1024)},
    "latents": {"shape": Shape(512, 32, 8, 128, 128, 2, 4, latents=LatentShape(576, 10**6))},
    "nodes of two": {"grid": grid_of(16, 2), "nodes": "aabbccddeeffgghh"},
    "rows over nodes": {"nodes": "aabbccddeeffgghh"},
    "in another order": {"grid": Grid(((1, 0, *range(2, 16)),)), "nodes": range(16)},
}


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("case", ["", "a rank a node", *NO_MESH])
def test_where_it_does_not_apply_to_a_mesh_it_is_one(case: str, blocks: int | None) -> None:
    given = {
        **{"tiling": Tiling(zigzag(8 * 1024, 16), Mask.causal()), "grid": grid_of(16, 4)},
        **{"nodes": "aaaabbbbccccdddd", "shape": shape_of(512, heads=32, kv_heads=4)},
        **({"grid": flat_grid(16), "nodes": range(16)} if case == "a rank a node" else {}),
        **NO_MESH.get(case, {}),
    }
    config = BurstConfig(topology="mesh", backward="kv", blocks_per_call=blocks)
    choice = choose(config, *(given[name] for name in ("tiling", "grid", "shape", "nodes")))
    (taken,) = choice.backward
    assert isinstance(taken.schedule, Mesh) and taken.schedule.sent is Kind.KV
    assert (taken.schedule.blocks_per_call > 1) == (case not in NO_MESH)
    assert ("backward the 2 x 2 kv mesh of" in str(choice)) == (case == "")


def test_a_mesh_holds_several_blocks_within_the_limit() -> None:
    """Where so many are asked for, and do not fit, that is an error; `auto` takes fewer."""
    tiling, grid = Tiling(zigzag(8 * 1024, 16), Mask.causal()), grid_of(16, 4)
    given = tiling, grid, shape_of(512, kv_heads=4), "aaaabbbbccccdddd"

    def chosen(limit: float, blocks: int | None = None) -> tuple[int, int]:
        config = BurstConfig(topology="mesh", backward="kv", blocks_per_call=blocks)
        (taken,) = choose(config, *given, memory_limit=limit).backward
        assert isinstance(taken.schedule, Mesh) and taken.memory <= limit
        return taken.schedule.blocks_per_call, taken.memory

    found = [chosen(float("inf"))]
    while found[-1][0] > 1:
        found.append(chosen(found[-1][1] - 1))
    assert [blocks for blocks, _ in found] == [4, 2, 1]
    with pytest.raises(ValueError, match="lower --burst-blocks-per-call, raise --burst-memory-mb"):
        chosen(found[0][1] - 1, 4)


TAKEN = {  # the backward of so many ranks with so many tokens, and so many on a node
    "": ((64, 8), 4096, {}, "2 x 4 kv mesh of 2 blocks a call"),
    "one node": ((8, 8), 4096, {}, "kv ring of 2 blocks a call"),
    "large tiles": ((64, 8), 16384, {}, "4 x 2 query mesh"),
    "more between nodes": ((32, 16), 4096, {}, "query ring"),
    "half as much more in one": ((8, 8), 4096, {"shape": {"sends_raw": False}}, "query ring"),
    "one block a call": ((64, 8), 4096, {"blocks_per_call": 1}, "4 x 2 query mesh"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_larger_calls_make_up_for_bytes_within_nodes_alone(case: str) -> None:
    place, tokens, given, name = TAKEN[case]
    config = BurstConfig(**{key: value for key, value in given.items() if key != "shape"})
    shape = replace(shape_of(tokens, kv_heads=32), **given.get("shape", {}))
    tiling = Tiling(zigzag(place[0] * tokens, place[0]), Mask.causal())
    nodes = [rank // place[1] for rank in range(place[0])]

    def backward(limit: float = float("inf")) -> Sequence[Offer]:
        return choose(config, tiling, grid_of(*place), shape, nodes, memory_limit=limit).backward

    taken, *others = backward()
    assert taken.schedule.name == name
    assert taken.cost.nic == min(offer.cost.nic for offer in (taken, *others))
    assert all(3 * taken.cost.rank <= 4 * offer.cost.rank for offer in others)
    if taken.schedule.blocks_per_call > 1:
        assert "query" in backward(taken.memory - 1)[0].schedule.name


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
