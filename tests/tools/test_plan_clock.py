"""The planner's clock of all ranks at once against one that runs every rank's plan. (fast tier)"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_burst.config import BurstConfig, LayoutName, Topology
from megatron_burst.plans.choice import planning, timing
from megatron_burst.plans.choice.cost import Shape, Traffic
from megatron_burst.plans.choice.fewer import Fewer
from megatron_burst.plans.choice.machine import H100, MACHINES
from megatron_burst.plans.schedules import work
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import Mesh
from megatron_burst.plans.schedules.plan import Item, Kind, Plan, Step
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, choose_grid, flat_grid
from megatron_burst.plans.visibility.layout import contiguous, segmented_zigzag, striped, zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.flops import attention_flops
from tests.plans.simulator import Tile, payload, tiles_of
from tests.tools import event_clock
from tests.tools.test_plan_tool import cluster

TOKENS, RANKS = 96, 6
SHAPE = Shape(TOKENS // RANKS, 4, 2, 8, 16, element_bytes=2, gradient_bytes=4)
NODES = (0, 0, 0, 1, 1, 1)
GRID, FLAT = Grid(((0, 2, 1), (3, 4, 5))), flat_grid(RANKS)
MACHINE = cluster(
    forward_rate=7e9,
    backward_rate=5e9,
    within_rate=3e7,
    nic_rate=2e7,
    contention=0.2,
    copy_rate=1e9,
    step_seconds=2e-6,
    hop_seconds=(4e-6, 7e-6),
    grain=2.0,
    traffic=3.0,
    within_latency=1e-6,
    nic_latency=3e-6,
)
CAUSAL = Tiling(zigzag(TOKENS, RANKS), Mask.causal())
WINDOW = Tiling(zigzag(TOKENS, RANKS), Mask.causal(window=8))
PACKED = Tiling(zigzag(TOKENS, RANKS), Mask.causal(documents=[0, 30, 37, TOKENS]))
STRIPED = Tiling(striped(TOKENS, RANKS), Mask.causal())
TWICE = Tiling(segmented_zigzag([48, 48], RANKS), replace(Mask.causal(), query_stop=48))
WAYS = {
    "flat": Ring(CAUSAL, FLAT),
    "flat query home": Ring(CAUSAL, FLAT, Kind.QUERY),
    "double": Ring(CAUSAL, GRID),
    "double query home": Ring(CAUSAL, GRID, Kind.QUERY),
    "mesh": Mesh(CAUSAL, FLAT, 2),
    "mesh of queries": Mesh(CAUSAL, FLAT, 3, Kind.QUERY),
    "gathered": Ring(CAUSAL, FLAT, gather=True),
    "window": Ring(WINDOW, GRID, Kind.QUERY),
    "direct": Direct(WINDOW, GRID),
    "direct documents": Direct(PACKED, GRID, Kind.QUERY),
    "documents": Ring(PACKED, GRID),
    "striped": Ring(STRIPED, GRID, Kind.QUERY),
    "early rows": Ring(TWICE, GRID),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("per_nic", "beside"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_all_ranks_at_once_take_as_long_as_one_after_the_other(
    way: Schedule, backward: bool, per_nic: int, beside: int
) -> None:
    machine = replace(MACHINE, gpus_per_nic=per_nic)
    make = way.backward if backward else way.forward
    plans = [make(rank) for rank in range(RANKS)]
    links = timing.Links(NODES, SHAPE, machine, beside)
    expected = by_events(plans, links, backward)
    found = timing.pass_time(way, links, backward=backward)
    assert found == pytest.approx(expected, rel=1e-9)


def test_own_tiles_that_are_cut_alike_take_about_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under documents every rank's own tiles are others; each is cut only where they are few."""
    links, way = timing.Links(NODES, SHAPE, MACHINE, 1), WAYS["documents"]
    exact = timing.pass_time(way, links, backward=True)[:3]
    monkeypatch.setattr(work, "_MANY", 0)
    assert timing.pass_time(way, links, backward=True)[:3] == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("nic", "kv_heads", "near"), [(45e9, 32, 1.01), (2.8e9, 32, 1.05), (2.8e9, 4, 1.01)]
)
def test_more_ranks_than_are_timed_take_what_is_nearly_the_fastest(
    nic: float, kv_heads: int, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, shape = [n // 8 for n in range(64)], Shape(4096, 32, kv_heads, 128, 128, 2, 4)
    links = timing.Links.of(nodes, shape, replace(H100, nic_rate=nic), 1)
    grid, _ = choose_grid(Topology.DOUBLE, nodes)
    given = BurstConfig(), Tiling(zigzag(64 * 4096, 64), Mask.causal()), grid, shape, nodes
    timed = planning.choose(*given, links=links)
    monkeypatch.setattr(planning, "TIMED", 32)
    taken = planning.choose(*given, links=links)
    assert taken.forward[0].time is None, "not timed"
    for found, best in zip(taken.times(links), timed.times(links), strict=True):
        assert found.seconds <= near * best.seconds  # 1.003 of 1024 as of 256


def test_a_ring_whose_busiest_rank_computes_more_is_taken_where_it_is_faster() -> None:
    """A document of 1000 tokens of 1536: by keys 1.44 of the pairs, and 0.36 of the time."""
    nodes, shape = range(3), Shape(512, 16, 2, 128, 128, 2, 4, sends_raw=True)
    links = timing.Links.of(nodes, shape, replace(H100, nic_rate=2.8e9), 1)
    tiling = Tiling(zigzag(1536, 3), Mask.causal(documents=(0, 1000, 1536)))
    given = BurstConfig(), tiling, choose_grid(Topology.DOUBLE, nodes)[0], shape, nodes
    taken, *others = planning.choose(*given, links=links).backward
    assert taken.time and all(each.time for each in others)
    assert taken.time.seconds <= 1.005 * min(each.time.seconds for each in others if each.time)
    assert taken.schedule.pairs.max() > 1.4 * min(each.schedule.pairs.max() for each in others)


def test_what_messages_take_from_computing_grows_with_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On A100 a ring of 384 ranks sends more beside its tiles than a mesh: a tenth of its time."""
    nodes = [n // 8 for n in range(384)]
    shape = Shape(2048, 32, 32, 128, 128, 2, 4, sends_raw=True)
    links = timing.Links.of(nodes, shape, MACHINES["A100"], 1)
    grid, _ = choose_grid(Topology.DOUBLE, nodes)
    given = BurstConfig(), Tiling(zigzag(384 * 2048, 384), Mask.causal()), grid, shape, nodes
    taken = planning.choose(*given, links=links)
    monkeypatch.setattr(planning, "TIMED", 384)
    best = planning.choose(*given, links=links)
    assert best.forward[0].time and not taken.forward[0].time
    for found, least in zip(taken.times(links), best.times(links), strict=True):
        assert found.seconds <= 1.02 * least.seconds


def test_the_time_of_more_ranks_grows_with_what_bounds_it_and_keeps_the_rest() -> None:
    machine = replace(H100, nic_rate=1.0, within_rate=1.0, gpus_per_nic=2)
    ring = Ring(Tiling(zigzag(32, 4), Mask.causal()), flat_grid(4))
    few = Traffic(rank=2, nic=2), timing.PassTime(device=7.0, host=1.0, kernels=5.0, sums=1.0)
    fewer = Fewer({(Ring, Kind.KV): few}, 3.0, machine)
    assert fewer.seconds(ring, Traffic(rank=6, nic=6)) == 3 * 6 + 1, "computing: 1 is the first's"
    assert fewer.seconds(ring, Traffic(rank=20, nic=20)) == 2 * 20 + 1, "a NIC that two share"
    assert fewer.seconds(ring, Traffic(rank=50, nic=0)) == 50 + 1
    slower = replace(fewer, machine=replace(machine, contention=0.25))
    assert slower.seconds(ring, Traffic(rank=6, nic=6)) == 3 * 6 + 0.25 * 12
    assert fewer.seconds(replace(ring, sent=Kind.QUERY), Traffic(6, 6)) == float("inf")


def test_of_ranks_that_are_not_timed_as_many_are_as_make_a_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As many of these nodes as would fit have none: one, two or three."""
    shape, monkeypatched = Shape(64, 4, 4, 16, 16, 2, 4), monkeypatch.setattr
    for number, on_a_node, timed in ((6, 4, 4), (6, 2, 4), (6, 2, 6), (12, 1, 4), (44, 1, 43)):
        nodes = [n // on_a_node for n in range(number * on_a_node)]
        monkeypatched(planning, "TIMED", timed)
        links = timing.Links.of(nodes, shape, H100, 1)
        config = BurstConfig(topology=Topology.MESH)
        grid, _ = choose_grid(config.topology, nodes)
        tiling = Tiling(zigzag(64 * len(nodes), len(nodes)), Mask.causal())
        choice = planning.choose(config, tiling, grid, shape, nodes, links=links)
        assert isinstance(choice.backward[0].schedule, Mesh)


def test_more_ranks_than_are_timed_may_have_an_odd_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes, shape = [n // 2 for n in range(8)], Shape(5, 4, 4, 16, 16, 2, 4)
    links = timing.Links.of(nodes, shape, H100, 1)
    grid, _ = choose_grid(Topology.DOUBLE, nodes)
    tiling = Tiling(contiguous(8 * 5, 8), Mask.causal())
    monkeypatch.setattr(planning, "TIMED", 4)
    config = BurstConfig(layout=LayoutName.CONTIGUOUS)
    assert planning.choose(config, tiling, grid, shape, nodes, links=links).forward
    for fewer in planning._of_fewer(config, tiling, shape, nodes, float("inf"), links):
        assert fewer and all(time.kernels > 0 for _, time in fewer.known.values())


def by_events(plans: list[Plan], links: timing.Links, backward: bool) -> tuple[float, ...]:
    """What the clock of all ranks says, from tiles and messages one by one."""
    shape, machine, nodes = links.shape, links.machine, links.nodes
    sizes = shape.item_bytes(backward=backward)
    rate = machine.backward_rate if backward else machine.forward_rate
    nics = [
        (node, rank % 3 * links.beside // machine.gpus_per_nic) for rank, node in enumerate(nodes)
    ]
    leaving = Counter(
        nics[plan.rank]
        for plan in plans
        if any(nodes[plan.rank] != nodes[s.peer] for s in plan.sends)
    )

    def called(tiles: list[Tile]) -> int:
        """The rows of kernel calls, at most two of the block of queries."""
        return min(sum(tile.query_rows.length for tile in tiles), 2 * shape.tokens)

    def visitors(plan: Plan) -> list[int]:
        """By step, how many blocks of others' queries come."""
        found, last = [], plan.rank
        for step in plan.steps:
            owners = [t.query_owner for t in tiles_of(step) if t.query_owner != plan.rank]
            found.append(sum(a != b for a, b in pairwise([last, *owners])))
            last = [last, *owners][-1]
        return found

    def kernels(tiles: list[Tile]) -> float:
        dims = shape.query_heads, shape.head_dim, shape.value_head_dim
        pairs = sum(t.pairs for t in tiles) + machine.grain * called(tiles)
        return attention_flops(1, *dims, backward=backward) * pairs / rate

    def sums(tiles: list[Tile], visitors: int) -> float:
        dims = shape.head_dim + shape.value_head_dim
        moved = called(tiles) * 4 * (8 if backward else 16) * (2 + 8)
        moved += sum(t.key_rows.length for t in tiles) * 2 * dims * (2 + 8) if backward else 0
        made = visitors * shape.tokens * 4 * 16 * (2 + (2 if backward else 4))
        return machine.traffic * (moved + made) / machine.memory_rate

    def message(item: Item, source: int, target: int) -> tuple[str, float]:
        size = payload(item, sizes, shape.tokens)
        if nodes[source] == nodes[target]:
            return "within", machine.within_latency + size / machine.within_rate
        sharing = min(links.beside, machine.gpus_per_nic) * leaving[nics[source]]
        return "between", machine.nic_latency + size * sharing / machine.nic_rate

    come = {id(s): n for p in plans for s, n in zip(p.steps, visitors(p), strict=True)}

    def computing(rank: int, step: Step) -> float:
        sending = sum(message(s.item, rank, s.peer)[1] for s in step.sends)
        receiving = sum(message(r.item, r.peer, rank)[1] for r in step.receives)
        copied = sum(payload(s.item, sizes, shape.tokens) for s in step.sends) / machine.copy_rate
        taken = machine.contention * max(sending, receiving) + copied
        taken += machine.step_seconds if step.blocks else 0.0
        return kernels(tiles_of(step)) + sums(tiles_of(step), come[id(step)]) + taken

    most = max(plans, key=lambda plan: sum(tile.pairs for tile in tiles_of(plan)))
    ended = event_clock.duration(plans, computing, message)
    each = [sums(tiles_of(step), come[id(step)]) for step in most.steps]
    computed = sum(kernels(tiles_of(step)) for step in most.steps)
    hops = max(sum(bool(step.blocks or step.sends) for step in plan.steps) for plan in plans)
    return ended, hops * machine.hop_seconds[backward], computed, sum(each)
