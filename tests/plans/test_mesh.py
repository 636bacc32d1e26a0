"""Plans of meshes, and what they promise. (fast tier; the largest slow)"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_burst import BurstConfig
from megatron_burst.config import Topology
from megatron_burst.plans.choice.cost import Shape, traffic
from megatron_burst.plans.choice.machine import H100
from megatron_burst.plans.choice.planning import Offer, choose
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.schedules.mesh import Mesh, meshes
from megatron_burst.plans.schedules.plan import Channel, Kind
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.masks import LAYOUTS, Masking, hard_maskings
from tests.plans.simulator import bytes_held, plans_of, simulate, tiles_of
from tests.plans.test_plan import make_grid
from tests.tier import slow_if, some

CHUNK = 4
SHAPES = [(1, 4), (4, 1), (1, 6), (4, 2), (6, 2), (4, 3), (8, 1), (9, 1), (16, 1)]
GRIDS = [make_grid(*shape) for shape in SHAPES]
GRIDS += [make_grid(4, 2, shuffled=True), Grid(((3, 0, 2, 1),))]
LARGE = [make_grid(16, 1), make_grid(9, 1), make_grid(6, 2)]
BOTH = (False, True)
# DeepSeek-V3's heads with their own keys and values, and a Llama's with shared ones.
MHA = Shape(8192, 32, 32, 128, 128, 2, 4, sends_raw=True)
GQA = replace(MHA, kv_heads=8)


def nodes_of(grid: Grid) -> list[int]:
    return [grid.coordinates(rank)[0] for rank in range(grid.ranks)]


def every_mesh(grid: Grid, mask: Mask, layout: str = "zigzag") -> Iterator[Mesh]:
    tiling = Tiling(LAYOUTS[layout](4 * CHUNK * grid.ranks, grid.ranks), mask)
    return (mesh for kind in (Kind.KV, Kind.QUERY) for mesh in meshes(tiling, grid, kind))


@pytest.mark.parametrize("grid", slow_if(LARGE, GRIDS), ids=lambda grid: str(grid.rows))
def test_the_plans_fit_together_and_do_the_whole_work_once(grid: Grid) -> None:
    tokens = 4 * CHUNK * grid.ranks
    hard = [*hard_maskings(grid.ranks, 2 * CHUNK).values()]
    maskings = [Masking(), Masking(False), *some(hard, 8, grid.ranks % 8)]
    for number, masking in enumerate(maskings):
        layout = [*LAYOUTS][number % len(LAYOUTS)]
        pairs = int(masking.visible(tokens).sum())
        for mesh in every_mesh(grid, masking.mask, layout):
            for backward in BOTH:
                plans = plans_of(mesh, backward)
                simulate(plans, backward=backward, pairs=pairs)
                computed = [sum(tile.pairs for tile in tiles_of(plan)) for plan in plans]
                assert computed == mesh.pairs.tolist(), (mesh.name, masking)


@pytest.mark.parametrize("grid", slow_if(LARGE, GRIDS), ids=lambda grid: str(grid.rows))
def test_messages_and_bytes_are_those_of_the_formulas(grid: Grid) -> None:
    nodes, length = (grid.nodes, grid.ranks_per_node) if grid.nodes > 1 else (grid.ranks, 1)
    link = "BETWEEN" if grid.nodes > 1 else "WITHIN"
    read, result = Channel[f"READ_{link}"], Channel[f"GRADIENT_{link}"]
    ways = {Channel.READ_ACROSS: Channel.READ_WITHIN}
    for mesh in every_mesh(grid, Mask.full()):
        held, visitors = mesh.held, nodes // mesh.held
        for backward in BOTH:
            expected = Counter({(read, mesh.sent): held - 1, (read, mesh.sent.other): visitors - 1})
            if length > 1:
                expected[Channel.READ_WITHIN, mesh.sent] = nodes * (length - 1)
            for kind, count in ((mesh.sent, held), (mesh.sent.other, visitors)):
                if made := kind.result(backward=backward):
                    expected[result, made] = count - 1
                    if kind is mesh.sent and length > 1:
                        expected[Channel.GRADIENT_WITHIN, made.partial] = nodes * (length - 1)
            sizes = MHA.item_bytes(backward=backward)
            for plan in plans_of(mesh, backward):
                for ends in (plan.sends, plan.receives):
                    found = Counter(
                        (ways.get(end.channel, end.channel), end.item.kind) for end in ends
                    )
                    assert found == expected
            away, within = mesh.sends(sizes, backward=backward)
            counted = traffic(mesh.messages(backward=backward), sizes, nodes_of(grid), 4 * CHUNK)
            assert (counted.bottleneck, counted.rank) == (away, away + within)


@pytest.mark.parametrize("grid", slow_if(LARGE, GRIDS), ids=lambda grid: str(grid.rows))
def test_a_mesh_is_chosen_by_the_bytes_that_its_messages_have(grid: Grid) -> None:
    """Whether they are counted, or follow from a formula where all is needed."""
    masks = Mask.causal(), Mask.full(), Mask.causal(window=3 * CHUNK)
    for mask, nodes in itertools.product(masks, (nodes_of(grid), [*range(grid.ranks)])):
        tiling = Tiling(zigzag(4 * CHUNK * grid.ranks, grid.ranks), mask)
        choice = choose(BurstConfig(topology=Topology.MESH), tiling, grid, MHA, nodes)
        for (offer,), backward in zip((choice.forward, choice.backward), BOTH, strict=True):
            messages = offer.schedule.messages(backward=backward)
            sizes = MHA.item_bytes(backward=backward)
            assert offer.cost == traffic(messages, sizes, nodes, 4 * CHUNK)


@pytest.mark.parametrize("grid", slow_if(LARGE, GRIDS), ids=lambda grid: str(grid.rows))
def test_no_rank_holds_more_than_is_said(grid: Grid) -> None:
    """Buffers, and sums of others' results from their first tile until they have left."""
    for mask in (Mask.full(), Mask.causal(), Mask.causal(window=3 * CHUNK)):
        for mesh in every_mesh(grid, mask):
            for backward in BOTH:
                sizes = GQA.item_bytes(backward=backward)
                plans = plans_of(mesh, backward)
                most = max(bytes_held(plan, sizes, backward) for plan in plans)
                limit = mesh.memory(sizes, backward=backward)
                assert most <= limit
                if mask == Mask.full():
                    assert limit <= 1.6 * most, (mesh.name, backward)


@pytest.mark.parametrize("grid", [make_grid(6, 2), make_grid(8, 1)], ids=str)
def test_a_card_sends_one_block_at_a_time(grid: Grid) -> None:
    """Two would share the link, and the one that is due first would come later."""
    for mesh in every_mesh(grid, Mask.full()):
        for plan in (plan for backward in BOTH for plan in plans_of(mesh, backward)):
            busy = sorted(
                (number, send.lands)
                for number, step in enumerate(plan.steps)
                for send in step.sends
                if send.channel is Channel.READ_BETWEEN
            )
            assert len(busy) == sum(x - 1 for x in (mesh.held, mesh.table.visitors))
            assert all(lands < leaves for (_, lands), (leaves, _) in itertools.pairwise(busy))


@pytest.mark.parametrize(
    ("nodes", "forward", "step"), [(4, 0.67, 0.8), (8, 0.575, 0.65), (16, 0.405, 0.5)]
)
def test_without_grouped_heads_it_sends_so_much_less_than_a_double_ring(
    nodes: int, forward: float, step: float
) -> None:
    """As the formulas of a mesh have it; the log-sum-exps are what exceeds round numbers."""
    found = {topology: bottleneck(MHA, nodes, topology) for topology in ("auto", "double")}
    assert found["auto"][0] / found["double"][0] <= forward
    assert sum(found["auto"]) / sum(found["double"]) <= step


def bottleneck(shape: Shape, nodes: int, topology: str) -> tuple[int, int]:
    grid = make_grid(nodes, 8)
    tiling = Tiling(zigzag(shape.tokens * grid.ranks, grid.ranks), Mask.causal())
    choice = choose(BurstConfig(topology=topology), tiling, grid, shape, nodes_of(grid))
    return choice.forward[0].cost.bottleneck, choice.backward[0].cost.bottleneck


def test_with_grouped_heads_it_is_taken_where_it_saves_a_tenth() -> None:
    """Keys 4 times smaller than queries: a ring of them is hard to beat on few nodes."""
    for nodes, taken in ((4, Ring), (16, Mesh), (64, Mesh)):
        grid = make_grid(nodes, 1)
        tiling = Tiling(zigzag(8 * nodes, nodes), Mask.causal())
        choice = choose(BurstConfig(), tiling, grid, GQA, range(nodes))
        ring = next(o for o in choice.forward if isinstance(o.schedule, Ring))
        assert isinstance(choice.forward[0].schedule, taken)
        if taken is Mesh:
            assert choice.forward[0].cost.bottleneck <= 0.9 * ring.cost.bottleneck


@pytest.mark.parametrize(
    ("tokens", "rate", "taken"), [(16384, 40e9, Ring), (8192, 60e9, Mesh)], ids=["tie", "faster"]
)
def test_by_the_clock_it_has_to_be_faster(tokens: int, rate: float, taken: type) -> None:
    """A mesh of fewer bytes, 0.4 and 0.6 % faster than the fastest ring."""
    shape, tiling = replace(MHA, tokens=tokens), Tiling(zigzag(tokens * 8, 8), Mask.causal())
    links = Links.of(range(8), shape, replace(H100, nic_rate=rate), 1)
    grid = make_grid(8, 1)
    found = choose(BurstConfig(), tiling, grid, shape, range(8), links=links).backward
    mesh, ring = ([x for x in found if isinstance(x.schedule, kind)] for kind in (Mesh, Ring))
    assert min(of_seconds(mesh)) < min(of_seconds(ring))
    assert min(x.cost.rank for x in mesh) < min(x.cost.rank for x in ring)
    assert isinstance(found[0].schedule, taken)


def of_seconds(offers: Sequence[Offer]) -> list[float]:
    return [offer.time.seconds for offer in offers if offer.time]


def test_it_falls_back_to_what_fits_the_memory() -> None:
    grid = make_grid(16, 1)
    tiling = Tiling(zigzag(16 * 8, 16), Mask.causal())
    held, limit = [], float("inf")
    while True:
        (taken, *_) = choose(
            BurstConfig(), tiling, grid, MHA, range(16), memory_limit=limit
        ).forward
        held.append(taken)
        if isinstance(taken.schedule, Ring):
            break
        limit = taken.memory - 1
    assert len(held) > 2
    assert [*held] == sorted(held, key=lambda offer: offer.cost.bottleneck)
    config = BurstConfig(topology="mesh")
    with pytest.raises(ValueError, match="raise --burst-memory-mb"):
        choose(config, tiling, grid, MHA, range(16), memory_limit=limit)


def test_a_prime_number_of_nodes_makes_no_mesh() -> None:
    config, tiling = BurstConfig(topology="mesh"), Tiling(zigzag(80, 5), Mask.causal())
    with pytest.raises(ValueError, match="two or more, but there are 5"):
        choose(config, tiling, flat_grid(5), MHA, [0] * 5)
    assert not isinstance(
        choose(BurstConfig(), tiling, flat_grid(5), MHA, [0] * 5).forward[0].schedule, Mesh
    )


def test_a_rank_with_more_work_than_in_a_ring_is_not_worth_the_bytes() -> None:
    """Two documents of unequal length: ranks of a mesh meet more of the long one than others."""
    taken = {}
    for documents in ((0, 128), (0, 24, 128)):
        tiling = Tiling(zigzag(128, 8), Mask.causal(documents=documents))
        taken[len(documents) - 1], *others = choose(
            BurstConfig(), tiling, flat_grid(8), MHA, range(8)
        ).forward
    assert isinstance(taken[1].schedule, Mesh)
    mesh, ring = next(o for o in others if isinstance(o.schedule, Mesh)), taken[2]
    assert isinstance(ring.schedule, Ring)
    assert mesh.cost.bottleneck < 0.7 * ring.cost.bottleneck
    assert mesh.schedule.pairs.max() > 1.05 * ring.schedule.pairs.max()


def test_within_a_node_it_has_to_be_asked_for() -> None:
    tiling = Tiling(zigzag(64, 4), Mask.causal())
    for topology, taken in (("auto", Ring), ("mesh", Mesh)):
        choice = choose(BurstConfig(topology=topology), tiling, flat_grid(4), MHA, [0] * 4)
        assert isinstance(choice.forward[0].schedule, taken)
