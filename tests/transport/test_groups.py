"""Where ranks are, and the process groups of their rings, made or adopted. (fast tier)"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.transport import groups
from megatron_burst.transport.groups import (
    channels_of,
    make_groups,
    nodes_of_ranks,
)
from tests.attention.cases import (
    FLOAT32_TOLERANCE,
    HEADS,
    Case,
    MakeContext,
    answer,
    errors,
    logged,
    put_together,
    run_cases,
)
from tests.plans.masks import Masking
from tests.workers import Team, WorkerPool

WITHIN = (Channel.READ_WITHIN, Channel.GRADIENT_WITHIN)
BETWEEN = (Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN)


@pytest.mark.parametrize(
    ("grid", "channels"),
    [
        (flat_grid(1), ()),
        (flat_grid(4), WITHIN),
        (Grid(((0,), (1,), (2,))), BETWEEN),
        (Grid(((0, 1), (2, 3))), (*WITHIN, *BETWEEN)),
    ],
    ids=["alone", "one node", "nodes of one", "double"],
)
def test_a_grid_has_the_channels_that_its_rings_use(
    grid: Grid, channels: tuple[Channel, ...]
) -> None:
    assert channels_of(grid) == channels


def test_the_all_to_all_has_the_channel_of_reads_within_the_node() -> None:
    assert channels_of(flat_grid(1), 4) == (Channel.READ_WITHIN,)
    assert channels_of(Grid(((0,), (1,))), 2) == (Channel.READ_WITHIN, *BETWEEN)
    assert channels_of(flat_grid(2), 2) == WITHIN


def new_groups(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's of the groups; all ranks of the job make all."""
    made = [dist.new_group(ranks) for ranks in lists]
    return next(g for g in made if dist.get_rank() in dist.get_process_group_ranks(g))


def every_second(_: Team, config: BurstConfig) -> BurstContext:
    """Context parallelism across tensor parallelism of two: ranks 0, 2, 4, 6 and 1, 3, 5, 7."""
    return BurstContext.create(config, new_groups([range(t, 8, 2) for t in range(2)]))


def adopted(_: Team, config: BurstConfig) -> BurstContext:
    """The same with the groups that Megatron makes for a hierarchy of 2 x 2."""
    group = new_groups([range(t, 8, 2) for t in range(2)])
    within = new_groups([(t, t + 2) for t in (0, 1, 4, 5)])
    between = new_groups([(t, t + 4) for t in range(4)])
    context = BurstContext.create(config, group, hierarchy=(within, between))
    channels = context.communicator._channels
    assert channels[Channel.READ_WITHIN] is within and channels[Channel.READ_BETWEEN] is between
    assert len({id(g) for g in channels.values()}) == 4
    return context


@pytest.mark.parametrize("make_context", [every_second, adopted])
def test_context_parallelism_across_tensor_parallelism(
    workers: WorkerPool, make_context: object
) -> None:
    per_node = {} if make_context is adopted else {"ranks_per_node": 4}
    cases = [
        Case(config={"backward": backward, **per_node}, heads=heads, chunk=5)
        for backward, heads in zip(("kv", "query"), HEADS.values(), strict=False)
    ]
    replies = workers.run(range(8), answer, cases, "cpu", make_context)
    for half in (replies[0::2], replies[1::2]):
        for case, whole in zip(cases, put_together(cases, half), strict=True):
            assert max(errors(whole.found, case.expected(4)).values()) < FLOAT32_TOLERANCE
            grids = {reply.grid for reply in whole.replies}
            assert grids == {"double ring of 2 nodes x 2 ranks"}


@pytest.mark.parametrize("make_context", [every_second, adopted])
@pytest.mark.parametrize(
    "masking", [Masking(window=5), Masking(documents=(0, 3, 17, 21, 40))], ids=str
)
def test_masks_over_these_groups(
    workers: WorkerPool, make_context: MakeContext, masking: Masking
) -> None:
    """Adopted groups reach along rows and columns of the grid alone, not from corner to corner."""
    per_node = {} if make_context is adopted else {"ranks_per_node": 4}
    cases = [
        Case(config={"backward": way, **per_node}, masking=masking, chunk=5)
        for way in ("kv", "query")
    ]
    replies = workers.run(range(8), answer, cases, "cpu", make_context)
    for half in (replies[0::2], replies[1::2]):
        for case, whole in zip(cases, put_together(cases, half), strict=True):
            assert max(errors(whole.found, case.expected(4)).values()) < FLOAT32_TOLERANCE


def met_before_the_first_message(team: Team) -> dict[str, bool]:
    """For each channel of adopted groups, whether its ranks have all met, as NCCL wants it."""
    met: list[dist.ProcessGroup] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", met.append)
        context = adopted(team, BurstConfig())
    return {str(c): group in met for c, group in context.communicator._channels.items()}


def test_every_channel_is_met_by_all_its_ranks_at_the_start_adopted_ones_too(
    workers: WorkerPool,
) -> None:
    every = dict.fromkeys(map(str, (*WITHIN, *BETWEEN)), True)
    assert workers.run(range(8), met_before_the_first_message) == [every] * 8


def members_of_channels(team: Team, rows: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    channels = make_groups(BurstConfig(), team.group, Grid(rows), None).channels
    assert len({id(group) for group in channels.values()}) == len(channels)
    found = {str(c): dist.get_process_group_ranks(group) for c, group in channels.items()}
    return {**found, "adopted": [g is team.group for g in channels.values()]}


@pytest.mark.parametrize(
    ("rows", "channels"),
    [
        ((tuple(range(8)),), WITHIN),
        (tuple((rank,) for rank in range(8)), BETWEEN),
        (((0, 1, 2, 3), (4, 5, 6, 7)), (*WITHIN, *BETWEEN)),
    ],
    ids=["flat", "nodes of one", "double"],
)
def test_the_first_channel_is_the_callers_group_and_the_others_are_new(
    workers: WorkerPool, rows: tuple[tuple[int, ...], ...], channels: tuple[Channel, ...]
) -> None:
    ranks = list(range(8))
    expected = dict.fromkeys(map(str, channels), ranks)
    first = [True] + [False] * (len(channels) - 1)
    assert workers.run(ranks, members_of_channels, rows) == [{**expected, "adopted": first}] * 8


def described(team: Team, rows: tuple[tuple[int, ...], ...]) -> set[str]:
    made = []
    with pytest.MonkeyPatch.context() as patch:
        new_group = dist.new_group
        patch.setattr(
            dist, "new_group", lambda *a, **k: made.append(new_group(*a, **k)) or made[-1]
        )
        make_groups(BurstConfig(), team.group, Grid(rows), None)
    return {group.group_desc for group in made}


def test_each_new_group_says_what_it_is_for(workers: WorkerPool) -> None:
    channels = {f"burst {channel}" for channel in (*WITHIN[1:], *BETWEEN)}
    expected = {*channels, "burst agreement"}
    assert workers.run(range(8), described, ((0, 1, 2, 3), (4, 5, 6, 7))) == [expected] * 8


class OnNccl:
    """Stands in for a process group of NCCL; there are none without a GPU."""

    def __init__(self, has_priority: bool) -> None:
        self.options = SimpleNamespace(is_high_priority_stream=has_priority)

    def _get_backend(self, device: torch.device) -> "OnNccl":
        assert device.type == "cuda"
        return self


@pytest.mark.parametrize("high", [False, True])  # as --high-priority-stream-groups makes it
@pytest.mark.parametrize("in_hierarchy", [False, True])  # whose names are cp, and hcp
def test_streams_have_high_priority_as_the_callers_group(
    monkeypatch: pytest.MonkeyPatch, high: bool, in_hierarchy: bool
) -> None:
    hierarchy = [OnNccl(high) for _ in range(2)]
    group = OnNccl(high and not in_hierarchy)
    made: list[SimpleNamespace] = []

    def new_group(ranks: object, limit: object = None, **kwargs: object) -> SimpleNamespace:
        made.append(SimpleNamespace(**kwargs))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: range(4))
    monkeypatch.setattr(type(dist.group), "WORLD", group)
    monkeypatch.setattr(groups, "gather_objects", lambda _, __, value, ___: [value])
    config, grid = BurstConfig(), Grid(((0, 1), (2, 3)))
    found = make_groups(config, group, grid, hierarchy if in_hierarchy else None)
    callers = hierarchy if in_hierarchy else [group]
    channels = list(found.channels.values())
    assert set(found.channels) == {*WITHIN, *BETWEEN}
    assert [any(g is c for c in channels) for g in callers] == [True] * len(callers)
    options = [group.pg_options for group in channels if group not in callers]
    assert len(options) == 4 - len(callers)
    assert [o is not None and o.is_high_priority_stream for o in options] == [high] * len(options)
    assert len({id(o) for o in options if o}) == high * len(options), "torch writes into each"


def refused(_: Team) -> str:
    group = new_groups([range(4), range(4, 8)])
    hierarchy = (new_groups([range(t, t + 2) for t in range(0, 8, 2)]), group)
    try:
        BurstContext.create(BurstConfig(topology="flat"), group, hierarchy=hierarchy)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_flat_ring_does_not_adopt_the_groups_of_a_hierarchy(workers: WorkerPool) -> None:
    (message,) = set(workers.run(range(8), refused))
    assert "2 x 4 ranks were given, but the configuration makes a flat ring" in message
    assert "take --burst-topology double" in message


@contextmanager
def torchrun_node(number: int | None) -> Iterator[None]:
    before = os.environ.pop("GROUP_RANK", None)
    if number is not None:
        os.environ["GROUP_RANK"] = str(number)
    yield
    os.environ.pop("GROUP_RANK", None)
    if before is not None:
        os.environ["GROUP_RANK"] = before


def classes(nodes: Sequence[object]) -> list[int]:
    return [nodes.index(node) for node in nodes]


def detected_nodes(team: Team, launched_on: list[int] | None, per_node: int | None) -> list[int]:
    config = BurstConfig(ranks_per_node=per_node)
    with torchrun_node(launched_on[team.rank] if launched_on else None):
        return classes(nodes_of_ranks(config, team.group, None))


@pytest.mark.parametrize(
    ("launched_on", "per_node", "expected"),
    [
        (None, None, [0, 0, 0, 0, 0]),  # one host
        ([0, 1, 0, 1, 1], None, [0, 1, 0, 1, 1]),  # two launchers
        ([0, 1, 0, 1, 1], 4, [0, 1, 1, 1, 1]),  # as told: processes 3 | 4, 5, 6, 7
        (None, 2, [0, 1, 1, 3, 3]),  # 3 | 4, 5 | 6, 7
        (None, 8, [0, 0, 0, 0, 0]),
    ],
)
def test_a_node_is_a_host_and_a_launcher_unless_told(
    workers: WorkerPool, launched_on: list[int] | None, per_node: int | None, expected: list[int]
) -> None:
    assert workers.run(5, detected_nodes, launched_on, per_node) == [expected] * 5


def launched_in_turns(team: Team, config: BurstConfig) -> BurstContext:
    with torchrun_node(team.rank % 2):
        return team.context(config)


@pytest.mark.parametrize("topology", ["flat", "double"])
@pytest.mark.parametrize("backward", ["kv", "query"])
def test_ranks_may_be_placed_in_turns(workers: WorkerPool, topology: str, backward: str) -> None:
    cases = [Case(config={"topology": topology, "backward": backward})]
    (found,) = run_cases(workers, 6, cases, make_context=launched_in_turns)
    assert max(errors(found.found, cases[0].expected(6)).values()) < FLOAT32_TOLERANCE
    between = [sum(reply.forward[c] for c in BETWEEN) for reply in found.replies]
    assert all(between) == (topology == "double")


def rows_in_turns(team: Team, topology: str) -> tuple[tuple[int, ...], ...]:
    return launched_in_turns(team, BurstConfig(topology=topology)).grid.rows


def test_a_flat_ring_goes_node_by_node(workers: WorkerPool) -> None:
    assert workers.run(5, rows_in_turns, "flat") == [((0, 2, 4, 1, 3),)] * 5
    assert workers.run(6, rows_in_turns, "double") == [((0, 2, 4), (1, 3, 5))] * 6


def grid_and_lines(team: Team, config: BurstConfig) -> tuple[str, list[str]]:
    with logged() as lines:
        return str(team.context(config).grid), lines


@pytest.mark.parametrize(
    ("ranks", "per_node", "held"), [(5, 2, "1, 2, 2"), (7, 4, "3, 4"), (6, 3, "1, 3, 2")]
)
@pytest.mark.parametrize("topology", ["auto", "double"])
def test_unequal_nodes_make_a_flat_ring_and_one_line_in_the_log(
    workers: WorkerPool, ranks: int, per_node: int, held: str, topology: str
) -> None:
    config = BurstConfig(ranks_per_node=per_node, topology=topology)
    grids, lines = zip(*workers.run(ranks, grid_and_lines, config), strict=True)
    assert set(grids) == {"flat ring"}
    why = f"because its nodes hold unequal numbers of ranks ({held})"
    assert lines == ([f"burst attention: a flat ring ordered by node, {why}"], *[[]] * (ranks - 1))


@pytest.mark.parametrize(
    ("algorithm", "topology", "grid"),
    [
        ("burst", "auto", "double ring of 2 nodes x 2 ranks"),
        ("burst", "flat", "flat ring"),
        ("ring", "auto", "flat ring"),
        ("ring", "double", "double ring of 2 nodes x 2 ranks"),
        ("allgather", "auto", "flat ring"),
        ("ulysses", "auto", "flat ring"),
    ],
)
def test_equal_nodes_make_a_double_ring_for_burst_and_where_asked_for(
    workers: WorkerPool, algorithm: str, topology: str, grid: str
) -> None:
    config = BurstConfig(algorithm=algorithm, topology=topology, ranks_per_node=2)
    assert workers.run(4, grid_and_lines, config) == [(grid, [])] * 4
