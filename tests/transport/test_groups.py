"""Where ranks are, and the process groups of their rings, and who is on them. (fast tier)"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.config import Topology
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.topology import Grid, choose_grid
from megatron_burst.transport import groups, nccl
from megatron_burst.transport.groups import (
    Members,
    make_groups,
    members_of_channels,
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
from tests.tier import one_in
from tests.workers import Team, WorkerPool

WITHIN = (Channel.READ_WITHIN, Channel.READ_ACROSS, Channel.GRADIENT_WITHIN)
BETWEEN = (Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN)
DIRECT = (Channel.READ_DIRECT, Channel.GRADIENT_DIRECT)


def test_a_rank_shares_a_channel_with_those_that_its_messages_reach() -> None:
    def of(nodes: Sequence[int], size: int = 1, topology: str = "double") -> dict[str, Members]:
        heads = head_groups(nodes, size)
        on = [nodes[members[0]] for members in heads.groups]
        found = members_of_channels(choose_grid(Topology(topology), on)[0], heads)
        return {channel.name.split("_")[-1]: members for channel, members in found.items()}

    assert of([0]) == {}
    assert of([0, 0]) == {"WITHIN": ((0, 1),)}, "a rank has one to read from"
    assert of([0] * 4) == {"WITHIN": ((0, 1, 2, 3),), "ACROSS": ((0, 1, 2, 3),)}
    assert of([0, 1, 2]) == {"BETWEEN": ((0, 1, 2),)}
    rows, rails = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert of([0, 0, 1, 1]) == {"WITHIN": rows, "BETWEEN": rails, "DIRECT": (tuple(range(4)),)}
    assert of([0, 1, 0, 1])["WITHIN"] == rails
    flat = of([0, 0, 1, 1], topology="flat")
    assert flat == dict.fromkeys(("WITHIN", "ACROSS"), ((0, 1, 2, 3),))
    flat = of([0, 0, 1])
    assert set(flat.values()) == {((0, 1, 2),)}, "nodes of unequal size make a flat ring"
    assert of([0] * 4, 4) == {"HEADS": ((0, 1, 2, 3),)}
    assert of([0, 0, 1, 1], 2) == {"HEADS": rows, "BETWEEN": rails}
    assert of([0] * 4, 2) == {"HEADS": rows, "WITHIN": rails}
    eight = of([0] * 4 + [1] * 4, 2)
    assert eight["WITHIN"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert eight["BETWEEN"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert eight["DIRECT"] == ((0, 2, 4, 6), (1, 3, 5, 7))


def new_groups(lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's of the groups; all ranks of the job make all."""
    made = [dist.new_group(ranks) for ranks in lists]
    return next(g for g in made if dist.get_rank() in dist.get_process_group_ranks(g))


def every_second(_: Team, config: BurstConfig) -> BurstContext:
    """Context parallelism across tensor parallelism of two: ranks 0, 2, 4, 6 and 1, 3, 5, 7."""
    return BurstContext.create(config, new_groups([range(t, 8, 2) for t in range(2)]))


def in_a_hierarchy(_: Team, config: BurstConfig) -> BurstContext:
    """The same with the groups that Megatron makes for a hierarchy of 2 x 2, which ours equal."""
    group = new_groups([range(t, 8, 2) for t in range(2)])
    within = new_groups([(t, t + 2) for t in (0, 1, 4, 5)])
    between = new_groups([(t, t + 4) for t in range(4)])
    context = BurstContext.create(config, group, hierarchy=(within, between))
    channels, ranks_of = context.communicator._channels, dist.get_process_group_ranks
    heads_within = context.heads.size > 1
    expected = dict.fromkeys((Channel.HEADS,) if heads_within else WITHIN[::2], within)
    expected |= dict.fromkeys(BETWEEN, between)
    expected |= {} if heads_within else dict.fromkeys(DIRECT, group)
    assert {c: ranks_of(g) for c, g in channels.items()} == {
        c: ranks_of(theirs) for c, theirs in expected.items()
    }
    theirs = within, between, group
    assert len({*map(id, (*channels.values(), *theirs))}) == len(channels) + 3
    return context


MASKS = [Masking(), Masking(window=5), Masking(documents=(0, 3, 17, 21, 40))]


@pytest.mark.parametrize(
    ("heads_over", "make_context"),
    one_in(4, itertools.product([2, 1], [every_second, in_a_hierarchy])),
)
def test_context_parallelism_across_tensor_parallelism(
    workers: WorkerPool, make_context: MakeContext, heads_over: int
) -> None:
    """Of 4 ranks on 2 nodes; some masks go straight, from corner to corner of the grid, too."""
    per_node = {} if make_context is in_a_hierarchy else {"ranks_per_node": 4}
    config = {"head_parallel_size": heads_over, **per_node}
    ways = itertools.product(("kv", "query"), MASKS)
    cases = [
        Case(config={**config, "backward": way}, masking=mask, heads=heads, chunk=5)
        for (way, mask), heads in zip(ways, itertools.cycle(HEADS.values()))
    ]
    replies = workers.run(range(8), answer, cases, "cpu", make_context)
    for half in (replies[0::2], replies[1::2]):
        for case, whole in zip(cases, put_together(cases, half), strict=True):
            assert max(errors(whole.found, case.expected(4)).values()) < FLOAT32_TOLERANCE
            grid = "flat ring" if heads_over == 2 else "double ring of 2 nodes x 2 ranks"
            assert {reply.grid for reply in whole.replies} == {grid}


def made(team: Team, rows: tuple[tuple[int, ...], ...]) -> list[tuple[str, tuple[int, ...], bool]]:
    """What each call of torch is for, between whom, and whether this rank has that group."""
    calls, new_group = [], dist.new_group

    def noted(ranks: Sequence[int], *given: Any, **options: Any) -> Any:
        calls.append((options["group_desc"], tuple(ranks), team.rank in ranks))
        assert "use_local_synchronization" not in options
        return new_group(ranks, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        found = make_groups(team.group, Grid(rows), head_groups([0] * 8, 1), 4, 60.0)
    ours = [(said, ranks) for said, ranks, is_ours in calls if is_ours]
    groups = [*found.channels.values(), found.agreement]
    assert ours == [(g.group_desc, tuple(dist.get_process_group_ranks(g))) for g in groups]
    return [(said, ranks, False) for said, ranks, _ in calls]


def test_all_ranks_make_all_groups_in_one_order_and_each_says_what_it_is_for(
    workers: WorkerPool,
) -> None:
    rows = (0, 1, 2, 3), (4, 5, 6, 7)
    first, *others = workers.run(range(8), made, rows)
    assert all(calls == first for calls in others), "torch would name them differently, and hang"
    assert Counter(said for said, *_ in first) == {
        **{f"burst {channel}": 2 for channel in WITHIN},
        **{f"burst {channel}": 4 for channel in BETWEEN},
        **{f"burst {channel}": 1 for channel in DIRECT},
        "burst agreement": 1,
    }


class OnNccl:
    """Stands in for a process group of NCCL; there are none without a GPU."""

    def __init__(self) -> None:
        self.options = dist.ProcessGroupNCCL.Options()

    def _get_backend(self, device: torch.device) -> "OnNccl":
        assert device.type == "cuda"
        return self


@pytest.mark.parametrize("in_hierarchy", [False, True])  # whose names are cp, and hcp
def test_communicators_have_our_options_and_the_callers_win(
    monkeypatch: pytest.MonkeyPatch, in_hierarchy: bool
) -> None:
    group, hierarchy = OnNccl(), [OnNccl(), OnNccl()]
    made: list[SimpleNamespace] = []

    def new_group(ranks: object, limit: object = None, **kwargs: object) -> SimpleNamespace:
        made.append(SimpleNamespace(**kwargs))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: range(4))
    monkeypatch.setattr(type(dist.group), "WORLD", group)
    monkeypatch.setattr(groups, "gather_objects", lambda _, __, value, ___: [value])
    arguments = group, Grid(((0, 1), (2, 3))), head_groups([0, 0, 1, 1], 1), 2, 7.0
    last = hierarchy if in_hierarchy else None

    def options() -> list[Any]:
        made.clear()
        make_groups(*arguments, last)
        return [one.pg_options for one in made if hasattr(one, "pg_options") and one.pg_options]

    def settings() -> set[tuple[Any, ...]]:
        found = options()
        assert len({*map(id, found)}) == 6, "torch writes into each"
        return {(o.config.max_ctas, o.config.cga_cluster_size, o.config.min_ctas) for o in found}

    unset = dist.ProcessGroupNCCL.Options().config.min_ctas
    assert all(o.is_high_priority_stream for o in options())
    for said, has_it in (("0", False), ("false", False), ("1", True), ("y", True)):
        monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", said)
        assert {o.is_high_priority_stream for o in options()} == {has_it}, said
    assert {o._timeout.total_seconds() for o in options()} == {7.0}
    # A pair of a node has all channels, what leaves it few.
    assert settings() == {(32, 1, unset), (8, 1, unset)}
    callers = hierarchy[1] if in_hierarchy else group
    callers.options.config.cga_cluster_size = 2
    assert settings() == {(32, 2, unset), (8, 2, unset)}
    callers.options.config.min_ctas = 16
    assert settings() == {(32, 2, 16), (16, 2, 16)}, "NCCL refuses more at least than at most"
    callers.options.config.max_ctas = 24
    assert settings() == {(24, 2, 16)}


@contextmanager
def torchrun_node(number: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GROUP_RANK", raising=False)
        if number is not None:
            patch.setenv("GROUP_RANK", str(number))
        yield


def classes(nodes: Sequence[object]) -> list[int]:
    return [nodes.index(node) for node in nodes]


def detected_nodes(team: Team, launched_on: list[int] | None, per_node: int | None) -> list[int]:
    with torchrun_node(launched_on[team.rank] if launched_on else None):
        return classes(nodes_of_ranks(team.group, 60.0, None, per_node))


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


def test_the_nccl_that_is_loaded_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another than torch was built with may be loaded."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))

    def get_version(number: Any) -> None:
        number._obj.value = 23203

    opened = SimpleNamespace(ncclGetVersion=get_version)

    def there(name: str, mode: int) -> Any:
        assert (name, mode) == ("libnccl.so.2", os.RTLD_NOLOAD), "one that nobody uses says nothing"
        return opened

    monkeypatch.setattr(nccl.ctypes, "CDLL", there)
    assert nccl.loaded() == (2, 32, 3)

    def nothing(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr(nccl.ctypes, "CDLL", nothing)
    assert nccl.loaded() == (2, 28, 9)
