"""Plans of all grids up to 8 x 8, and what they promise. (fast; the largest slow)"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.schedules.plan import Channel, Kind, Plan, Transfer
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.layout import Layout, contiguous, zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.plan.timing import most_arrived
from tests.oracle import visible_pairs
from tests.plans.simulator import Tile, bytes_held, plans_of, simulate, tiles_of
from tests.tier import is_thorough, slow_if, some

CHUNK = 4
GQA = Shape(8192, 32, 8, 128, 128, 2, 4, sends_raw=True)  # of a Llama's heads
RETURNS = (True, False)
# What is sent and how its gradients return; None: the forward, in which only keys are sent.
KINDS = [(Kind.KV, None), *itertools.product((Kind.KV, Kind.QUERY), RETURNS)]


def make_grid(nodes: int, ranks_per_node: int, *, shuffled: bool = False) -> Grid:
    ranks = list(range(nodes * ranks_per_node))
    if shuffled:
        random.Random(nodes).shuffle(ranks)
    return Grid(tuple(itertools.batched(ranks, ranks_per_node)))


@dataclass(frozen=True)
class Variant:
    grid: Grid
    sent: Kind
    returns: bool | None
    gather: bool = False

    @property
    def backward(self) -> bool:
        return self.returns is not None

    def ring(self, layout: Layout, mask: Mask) -> Ring:
        returns = self.returns is not False
        return Ring(Tiling(layout, mask), self.grid, self.sent, returns, self.gather)

    def plans(self, layout: Layout, mask: Mask) -> list[Plan]:
        return plans_of(self.ring(layout, mask), self.backward)


def variants(*grids: Grid) -> list[Variant]:
    cases = itertools.product(grids, KINDS, (False, True))
    return [Variant(grid, *kind, gather) for grid, kind, gather in cases]


LENGTHS = (2, 3, 5, 8)  # of the rings of large grids
EVERY_GRID = [
    make_grid(m, n)
    for m, n in itertools.product(range(1, 9), repeat=2)
    if m * n <= 12 or {m, n} <= {*LENGTHS} or m == n
]
PERMUTED = [
    Grid(((3, 0, 2, 1, 4),)),
    Grid(((0, 2, 4, 6), (1, 3, 5, 7))),  # every second rank of the group on the other node
    make_grid(3, 3, shuffled=True),
    make_grid(4, 2, shuffled=True),
    make_grid(5, 1, shuffled=True),
]


@dataclass(frozen=True)
class Case:
    variant: Variant
    layout: Layout
    plans: list[Plan]


@pytest.fixture(
    scope="module",
    ids=lambda grid: str(grid.rows) if grid in PERMUTED else f"{grid.nodes}x{grid.ranks_per_node}",
    params=[
        pytest.param(grid, marks=pytest.mark.slow if grid.ranks > 9 else ())
        for grid in (*EVERY_GRID, *PERMUTED)
    ],
)
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """The plans of all variants on a grid for a causal mask under zigzag."""
    ranks = request.param.ranks
    layout = zigzag(2 * CHUNK * ranks, ranks)
    return [
        Case(variant, layout, variant.plans(layout, Mask.causal()))
        for variant in variants(request.param)
        if is_thorough() or ranks <= 6 or not variant.gather
    ]


def of_every_case(check: Callable[[Case], None]) -> Callable[[list[Case]], None]:
    """A test of a whole grid, which costs less than one of each variant."""

    def test(cases: list[Case]) -> None:
        for case in cases:
            with naming(case.variant):
                check(case)

    return test


@contextmanager
def naming(variant: Variant) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(f"for {variant}")
        raise


def messages(plan: Plan) -> Iterator[tuple[int, Transfer]]:
    """All messages with the step that posts them."""
    for number, step in enumerate(plan.steps):
        yield from ((number, message) for message in (*step.receives, *step.sends))


@of_every_case
def test_the_plans_of_all_ranks_fit_together_and_do_the_whole_work_once(case: Case) -> None:
    tokens = case.layout.ranks * case.layout.local_tokens
    simulate(case.plans, backward=case.variant.backward, pairs=tokens * (tokens + 1) // 2)


@of_every_case
def test_every_rank_computes_its_share(case: Case) -> None:
    pairs = [sum(tile.pairs for tile in tiles_of(plan)) for plan in case.plans]
    assert max(pairs) * len(pairs) <= 1.05 * sum(pairs)
    at_home = {Kind.KV: lambda tile: tile.query_owner, Kind.QUERY: lambda tile: tile.key_owner}[
        case.variant.sent
    ]
    assert all(at_home(tile) == plan.rank for plan in case.plans for tile in tiles_of(plan))


@of_every_case
def test_every_rank_sends_and_receives_as_many_messages_as_the_formulas_say(case: Case) -> None:
    kind, returns = case.variant.sent, case.variant.returns
    nodes, length = case.variant.grid.nodes, case.variant.grid.ranks_per_node
    expected = Counter({(Channel.READ_WITHIN, kind): nodes * (length - 1)})
    expected[Channel.READ_BETWEEN, kind] = nodes - 1
    if returns is not None:
        # A chain's last sum of a double ring comes from the next node: one hop more, to its owner.
        more = returns and nodes > 1 and length > 1
        summed = kind.gradient
        part = summed if returns else summed.partial
        of_node = part if length == 1 else summed
        expected[Channel.GRADIENT_WITHIN, part] = nodes * (length - 1) + more
        expected[Channel.GRADIENT_BETWEEN, of_node] = nodes - 1
    for plan in case.plans:
        for ends in (plan.sends, plan.receives):
            assert Counter((end.channel, end.item.kind) for end in ends) == expected


@of_every_case
def test_by_the_chain_ranks_with_a_node_each_send_to_one_neighbour(case: Case) -> None:
    grid = case.variant.grid
    if case.variant.returns is not False and 1 in (grid.nodes, grid.ranks_per_node):
        for plan in case.plans:
            assert len({send.peer for send in plan.sends}) == min(1, grid.ranks - 1)


@of_every_case
def test_few_blocks_of_others_are_there_at_a_time(case: Case) -> None:
    variant, grid = case.variant, case.variant.grid
    flat = 1 in (grid.nodes, grid.ranks_per_node)
    for plan in case.plans:
        most = most_arrived(plan)
        blocks, sums = most[variant.sent], most[variant.sent.gradient]
        if variant.gather:
            assert blocks == grid.ranks - 1
        else:
            assert blocks <= (2 if flat else 3)
        assert sums <= (1 if flat else 2)
        has_spare = grid.ranks_per_node == 1 and grid.nodes > 2
        assert most[variant.sent.gradient.partial] <= (2 if has_spare else 1)


@of_every_case
def test_no_rank_holds_more_than_is_said(case: Case) -> None:
    backward, sizes = case.variant.backward, GQA.item_bytes(backward=case.variant.backward)
    limit = case.variant.ring(case.layout, Mask.causal()).memory(sizes, backward=backward)
    assert max(bytes_held(plan, sizes, backward) for plan in case.plans) <= limit


@of_every_case
def test_tiles_are_computed_whenever_a_message_is_on_its_way(case: Case) -> None:
    for plan in case.plans:
        # An all-gather computes when all is there, which is what it is compared for.
        idle = {n for n, step in enumerate(plan.steps) if not step.blocks}
        on_their_way = {n for t, m in messages(plan) for n in range(t, m.lands + 1)}
        assert case.variant.gather or not idle & on_their_way


@of_every_case
def test_a_message_between_nodes_has_a_whole_pass(case: Case) -> None:
    grid, returns = case.variant.grid, case.variant.returns
    for plan in case.plans:
        spans: dict[Channel, list[int]] = {channel: [] for channel in Channel}
        for number, message in messages(plan):
            spans[message.channel].append(message.lands - number)
        for channel in (Channel.READ_WITHIN, Channel.GRADIENT_WITHIN):
            assert set(spans[channel]) <= {0}
        assert set(spans[Channel.READ_BETWEEN]) <= {grid.ranks_per_node - 1}
        if not case.variant.gather and returns is not None and grid.nodes > 1:
            # Two ends of each; for the last sum there is no further pass to wait for.
            least = 0 if returns else 1  # what goes straight home has a step to spare
            passes = [max(grid.ranks_per_node - 1, least)] * (grid.nodes - 2)
            assert sorted(spans[Channel.GRADIENT_BETWEEN]) == sorted(2 * [0, *passes])


# Other masks and layouts, on grids small enough to look at every pair of tokens.

SMALL = [make_grid(*shape) for shape in ((1, 1), (1, 2), (2, 1), (1, 5), (5, 1), (2, 2), (2, 3))]
IN_ORDER = make_grid(3, 3)  # which the shuffled one takes the place of in the fast tier
SMALL += [make_grid(3, 2), make_grid(2, 4), IN_ORDER, make_grid(3, 3, shuffled=True)]
SPLITS = [*itertools.product((zigzag, contiguous), (Mask.causal(), Mask.full()))]


def on_small_grids(check: Callable[[Variant], None]) -> Callable[[Grid], None]:
    """A test of each of these grids."""

    @pytest.mark.parametrize("grid", slow_if([IN_ORDER], SMALL), ids=lambda grid: str(grid.rows))
    def test(grid: Grid) -> None:
        for variant in variants(grid):
            with naming(variant):
                check(variant)

    return test


def times_computed(tiles: list[Tile], layout: Layout) -> Tensor:
    """How often each (query position, key position) is computed."""
    times = torch.zeros((layout.ranks * layout.local_tokens,) * 2, dtype=torch.int64)
    for tile in tiles:
        queries = layout.positions(tile.query_owner)[tile.query_rows.as_slice]
        keys = layout.positions(tile.key_owner)[tile.key_rows.as_slice]
        pairs = torch.from_numpy(tile.band.visible(len(queries), len(keys))).long()
        assert tile.pairs == pairs.sum()
        times[queries[:, None], keys[None, :]] += pairs
    return times


def split_plans(variant: Variant) -> Iterator[tuple[Layout, Mask, list[Plan], Tensor]]:
    """Every split with its plans and what sees what."""
    for split, mask in some(SPLITS, 2):
        layout = split(2 * CHUNK * variant.grid.ranks, variant.grid.ranks)
        visible = visible_pairs(layout.ranks * layout.local_tokens, mask.is_causal)
        yield layout, mask, variant.plans(layout, mask), visible


@on_small_grids
def test_every_visible_pair_is_computed_once(variant: Variant) -> None:
    for layout, mask, plans, visible in split_plans(variant):
        simulate(plans, backward=variant.backward, pairs=int(visible.sum()))
        times = times_computed([tile for plan in plans for tile in tiles_of(plan)], layout)
        assert torch.equal(times, visible.long()), (layout, mask)
        for plan in plans:
            landing = {message.lands for _, message in messages(plan)}
            posting = {number for number, _ in messages(plan)}
            computing = {number for number, step in enumerate(plan.steps) if step.blocks}
            assert landing | posting | computing == set(range(len(plan.steps))), (layout, mask)


@on_small_grids
def test_only_what_somebody_needs_is_sent(variant: Variant) -> None:
    for layout, mask, plans, visible in split_plans(variant):
        for owner in range(layout.ranks):
            found = Counter(s.channel for p in plans for s in p.sends if s.item.owner == owner)
            steps = steps_with_work(variant, layout, visible, owner)
            length = variant.grid.ranks_per_node
            is_passed_on = length == 1 and variant.returns is not False
            expected = reads_needed(steps, is_passed_on=is_passed_on)
            if variant.returns is not None:
                expected += gradients_needed(steps, length, variant.grid.nodes, variant.returns)
            assert found == expected, (layout, mask, owner)


def steps_with_work(
    variant: Variant, layout: Layout, visible: Tensor, owner: int
) -> list[list[int]]:
    """For each pass the steps, but not 0 of pass 0, at which the block meets a rank that needs it.

    By what the positions see of each other.
    """
    grid = variant.grid
    (node, local), mine = grid.coordinates(owner), layout.positions(owner)

    def needs(rank: int) -> bool:
        theirs = layout.positions(rank)
        queries, keys = (theirs, mine) if variant.sent is Kind.KV else (mine, theirs)
        return bool(visible[queries[:, None], keys[None, :]].any())

    return [
        [
            s
            for s in range(grid.ranks_per_node)
            if (p, s) != (0, 0) and needs(grid.at(node + p, local + s))
        ]
        for p in range(grid.nodes)
    ]


def reads_needed(steps: list[list[int]], *, is_passed_on: bool) -> Counter[Channel]:
    """To every node with work, or from node to node to the last one; in each to the last rank."""
    within = sum(max(work, default=0) for work in steps)
    nodes = [p for p, work in enumerate(steps) if p and work]
    between = max(nodes, default=0) if is_passed_on else len(nodes)
    return Counter({Channel.READ_WITHIN: within, Channel.READ_BETWEEN: between})


def gradients_needed(
    steps: list[list[int]], length: int, nodes: int, returns: bool
) -> Counter[Channel]:
    within = between = 0
    for p, work in enumerate(steps):
        if not work:
            continue
        if not returns:
            within += sum(s > 0 for s in work)
            between += p > 0
        else:  # from the first rank with a part to the node's last; in the owner's node to it
            within += length - 1 - min(work) + (p == 0)
    if returns and any(steps[1:]):
        between = nodes - min(p for p, work in enumerate(steps) if work and p)
        within += length > 1
    return Counter({Channel.GRADIENT_WITHIN: within, Channel.GRADIENT_BETWEEN: between})
