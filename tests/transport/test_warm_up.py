"""Who is on a channel, and whom NCCL connects before the first message. (fast tier)"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, ring_attention
from megatron_burst.attention.head_exchange import exchange_plan
from megatron_burst.config import Topology
from megatron_burst.plans.choice.head_parallel import HeadGroups, head_groups
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import meshes
from megatron_burst.plans.schedules.plan import Channel, Kind, Plan
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, choose_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport import warm_up
from megatron_burst.transport.errors import CommunicationError
from megatron_burst.transport.groups import members_of_channels
from megatron_burst.transport.warm_up import Connections, Way
from tests.tier import in_turn
from tests.workers import Team, WorkerPool

PLACES = [[0] * 2, [0] * 8, [*range(8)], [*range(4)] * 2, [0, 0, 1], [0, 0, 0, 1, 1, 2]]
SHAPES = [(2, 2), (3, 2), (4, 2), (2, 8), (4, 4), (8, 8)]
PLACES += [[node for node in range(nodes) for _ in range(length)] for nodes, length in SHAPES]


def schedules(grid: Grid) -> Iterator[Schedule]:
    """All that might be chosen, and what the baselines take."""
    tiling = Tiling(zigzag(2 * grid.ranks, grid.ranks), Mask.full())  # under which all sends to all
    for kind in (Kind.KV, Kind.QUERY):
        yield Direct(tiling, grid, kind)
        yield from meshes(tiling, grid, kind)
    yield from (Ring(tiling, grid, Kind.KV, chained, chained) for chained in (False, True))


@cache
def ways_of(grid: Grid) -> set[tuple[Channel, int, int]]:
    """Between which two of its ranks a channel ever has a message."""
    return {
        (hop.channel, hop.source, hop.target)
        for schedule in schedules(grid)
        for backward in (False, True)
        for hop in schedule.hops(backward=backward)
    }


def arranged(
    nodes: Sequence[Hashable], size: int, topology: Topology
) -> tuple[Grid, HeadGroups] | None:
    """The grid of a ring and the Ulysses groups, as a context makes them; None if it refuses."""
    try:
        heads = head_groups(nodes, size)
    except ValueError:
        return None
    return choose_grid(topology, [nodes[members[0]] for members in heads.groups])[0], heads


@pytest.mark.parametrize(
    ("nodes", "topology"), in_turn(PLACES, [Topology.DOUBLE, Topology.FLAT]), ids=str
)
def test_every_message_is_between_members_of_its_channel(
    nodes: list[int], topology: Topology
) -> None:
    found = [arranged(nodes, size, topology) for size in (1, 2, 4, 8, 32)]
    found.append(arranged([0] * len(nodes), len(nodes), topology))  # Ulysses alone
    seen = set[Channel]()
    for grid, heads in filter(None, found):
        group = {
            (channel, rank): some
            for channel, members in members_of_channels(grid, heads).items()
            for some in members
            for rank in some
        }
        assert len(group) % len(nodes) == 0, "a rank is in one group of each channel"
        ways = ways_of(grid)
        seen |= {channel for channel, *_ in ways}
        for channel, *ends in ways:
            is_after = grid.after(ends[0]) == ends[1]
            if channel in (Channel.READ_WITHIN, Channel.READ_ACROSS):
                assert is_after == (channel is Channel.READ_WITHIN), "of whom many CTAs take memory"
            for index in range(heads.size):
                source, target = (heads.ring(index)[end] for end in ends)
                assert target in group[channel, source], (channel, source, target)
        for members in heads.groups if heads.size > 1 else ():
            for index, rank in enumerate(members):
                for send in exchange_plan(index, heads.size).sends:
                    assert members[send.peer] in group[send.channel, rank]
    is_double = topology is Topology.DOUBLE and len(set(map(nodes.count, nodes))) == 1
    assert (Channel.READ_DIRECT in seen) == (is_double and 1 < len(set(nodes)) < len(nodes))


class Nccl:
    """A process group of NCCL without a GPU: what it was asked for."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self.asked = ranks, list[Any]()

    def _is_initialized(self) -> bool:
        return bool(self.asked)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.asked.append(device)


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[Nccl, bool, int]]]:
    """The batches that go to NCCL: for each operation its group, whether it sends, and its peer."""
    batches: list[list[tuple[Nccl, bool, int]]] = []

    def operation(way: Any, x: torch.Tensor, peer: int, group: Nccl) -> tuple[Nccl, bool, int]:
        assert x.numel() == 1 and peer in group.ranks
        return group, way is dist.isend, peer

    monkeypatch.setattr(warm_up, "nccl_of", lambda group: group)
    monkeypatch.setattr(warm_up, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**34 - 2**20 * len(batches), 2**34))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    monkeypatch.setattr(dist, "P2POp", operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: batches.append(batch) or [])
    return batches


def connections(rank: int, grid: Grid, first: int = 100) -> tuple[Connections, dict[Channel, Nccl]]:
    """Of a rank of a ring of ranks that the job knows by other numbers."""
    heads, jobs = head_groups([0] * grid.ranks, 1), range(first, first + grid.ranks)
    channels = {
        channel: Nccl([jobs[i] for some in members if rank in some for i in some])
        for channel, members in members_of_channels(grid, heads).items()
    }
    made: Any = channels
    found = Connections(made, dict.fromkeys(channels, jobs))
    found._rank = jobs[rank]
    return found, channels


GRID = Grid(((0, 1, 2, 3), (4, 5, 6, 7)))


def test_exactly_the_peers_of_the_plans_are_connected_once_and_at_both_ends(posted: Any) -> None:
    tiling = Tiling(zigzag(32, 8), Mask.causal(window=9))
    in_order = [Ring(tiling, GRID), Direct(tiling, GRID), Ring(tiling, GRID, Kind.QUERY)]
    known = defaultdict[int, set[Way]](set)
    for schedule in in_order:
        ends = set[object](), set[object]()
        for rank in range(8):
            plans = schedule.forward(rank), schedule.backward(rank)
            made, channels = connections(rank, GRID)
            made._known = known[rank]
            posted.clear()
            made.add(plans)
            names = {id(group): channel for channel, group in channels.items()}
            order = [{names[id(group)] for group, *_ in batch} for batch in posted]
            assert [len(each) for each in order] == [1] * len(order), "a batch a communicator"
            assert (at := [[*Channel].index(*each) for each in order]) == sorted(at)
            for group, sends, peer in (one for batch in posted for one in batch):
                ways = (rank, peer - 100) if sends else (peer - 100, rank)
                ends[sends].add((names[id(group)], *ways))
                moved = [t for p in plans for t in (p.sends if sends else p.receives)]
                assert (names[id(group)], peer - 100) in {(t.channel, t.peer) for t in moved}
            wanted = {(t.channel, 100 + t.peer) for p in plans for t in (*p.sends, *p.receives)}
            assert {(way.channel, way.peer) for way in known[rank]} >= wanted
            if schedule is in_order[0]:
                assert posted and {(w.channel, w.peer) for w in known[rank]} == wanted
            count = len(posted)
            made.add(plans)
            assert len(posted) == count, "a second call connects nobody"
        assert ends[0] == ends[1], "both ends at once, or one would wait for ever"


def test_no_more_peers_are_connected_at_once_than_nccl_bears(posted: Any) -> None:
    """Of a ring over 300 nodes, whose gradients go straight home; alike at both ends."""
    ring, ends = Ring(Tiling(zigzag(600, 300), Mask.full()), Grid(((*range(300),),))), []
    for rank in (0, 40, 170, 299):
        posted.clear()
        connections(rank, ring.grid)[0].add([ring.forward(rank), ring.backward(rank)])
        assert max(map(len, posted)) <= 252 and sum(map(len, posted)) == 2 + 2 * 299
        ways = [
            {(rank, peer - 100) if sends else (peer - 100, rank) for _, sends, peer in batch}
            for batch in posted[1:]  # behind that of its neighbours
        ]
        assert len(ways) == 3
        ends.append(ways)
    for mine, other in combinations(ends, 2):
        for n, m in product(range(3), repeat=2):
            assert n == m or not mine[n] & other[m]


def test_communicators_are_made_in_one_order_and_not_twice(posted: Any) -> None:
    made, channels = connections(5, GRID)
    made.make()
    made.make()
    asked = {channel: len(group.asked) for channel, group in channels.items()}
    direct = Channel.READ_ACROSS, Channel.READ_DIRECT, Channel.GRADIENT_DIRECT
    assert asked == {channel: int(channel not in direct) for channel in channels} and not posted
    for _ in range(2):
        made.add([], direct=True)  # of a rank without a message
        assert [len(group.asked) for group in channels.values()] == [1] * 7 and not posted
    alone, channels = connections(1, Grid((tuple(range(8)),)))  # where a mesh reads across the node
    alone.make()
    assert [len(channels[way].asked) for way in (Channel.READ_WITHIN, Channel.READ_ACROSS)] == [
        1,
        1,
    ]


def test_gloo_connects_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "nccl_of", lambda _: None)
    made, channels = connections(5, GRID)
    made.make()
    made.add([Ring(Tiling(zigzag(32, 8), Mask.causal()), GRID).forward(5)])
    assert not any(group.asked for group in channels.values())


def test_who_does_not_come_is_named(posted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    plan: Plan = Ring(Tiling(zigzag(32, 8), Mask.causal()), GRID).forward(5)
    made, _ = connections(5, GRID)
    monkeypatch.setattr(dist, "batch_isend_irecv", fails)
    with pytest.raises(CommunicationError) as error:
        made.add([plan])
    assert "could not connect to ranks 104, 106 for reads within the node: NCCL" in str(error.value)
    monkeypatch.setattr(Nccl, "eager_connect_single_device", lambda *_: fails(0))
    with pytest.raises(CommunicationError, match=r"meet ranks \[104, 105, 106, 107\] for reads wi"):
        made.make()


def test_what_nccl_takes_of_the_gpu_is_said(posted: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        connections(5, GRID)[0].add([Ring(Tiling(zigzag(32, 8), Mask.causal()), GRID).forward(5)])
    assert caplog.messages == ["burst attention: NCCL takes 2 MiB for 4 connections"]


def added(team: Team) -> list[tuple[int, bool, int, set[Channel]]]:
    """Of two equal calls and others: after how many bytes plans were connected, and which."""
    context, ring = (team.context(BurstConfig(head_parallel_size=size)) for size in (2, 1))
    found: list[tuple[int, bool, int, set[Channel]]] = []

    def note(_: Connections, plans: Sequence[Plan], *, direct: bool) -> None:
        channels = {transfer.channel for plan in plans for transfer in plan.sends}
        found.append((context.bytes_sent, direct, len(plans), channels))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connections, "add", note)
        for where, tokens, window in ((context, 4, None), (context, 4, None), (ring, 8, 1)):
            x = torch.ones(1, tokens, 2, 4, requires_grad=True)
            mask = Mask.causal(window=window)
            ring_attention(x, x, x, where, mask=mask).sum().backward()
    return found


def test_a_call_connects_before_its_first_message_and_an_equal_one_does_not(
    workers: WorkerPool,
) -> None:
    for (first, *whats), (second, is_direct, *_) in workers.run(4, added):
        within = {Channel.READ_WITHIN, Channel.GRADIENT_WITHIN}
        assert whats == [False, 3, {Channel.HEADS, *within}] and is_direct
        assert first == 0 < second
