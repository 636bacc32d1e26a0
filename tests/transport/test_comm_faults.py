"""A rank that dies, stalls or disagrees: every other one says what failed. (fast tier)"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.transport import comm
from megatron_burst.transport.comm import Transfers
from megatron_burst.transport.watchdog import Limit
from tests.workers import Team, WorkerPool, forkserver

BROKEN = 1
SLACK_SECONDS = 60  # for a machine with more to do
NAMED = re.compile(
    r"rank (?P<rank>\d), (forward|backward) step (?P<step>\d): could not "
    r"(receive|send) (partial )?(kv|d_kv|query|d_query) of CP rank \d (from|to) "
    r"rank (?P<peer>\d)"
)


def attend(context: BurstContext, batch: int = 1) -> None:
    q, k, v = (torch.randn(batch, 4, 2, 8, requires_grad=True) for _ in range(3))
    ring_attention(q, k, v, context, mask=Mask.causal()).sum().backward()


def stall(context: BurstContext) -> None:
    attend(context)
    if context.rank != BROKEN:
        attend(context)


def die_in_the_first_tile(context: BurstContext) -> None:
    attend(context)
    if context.rank == BROKEN:
        CpuKernel.forward = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    attend(context)


def stall_in_the_first_call(context: BurstContext) -> None:
    if context.rank != BROKEN:
        attend(context)


def stall_before_a_message(context: BurstContext) -> None:
    attend(context)
    if context.rank == BROKEN:
        Transfers.post = lambda *_: time.sleep(600)  # type: ignore[method-assign]
    attend(context)


@dataclass(frozen=True)
class StallInABackward:
    """The broken rank computes so many tiles of its second backward and then no more."""

    tiles: int

    def __call__(self, context: BurstContext) -> None:
        attend(context)
        if context.rank == BROKEN:
            left, backward = iter(range(self.tiles)), CpuKernel.backward

            def stalling(*arguments: Any, **keywords: Any) -> Any:
                if next(left, None) is None:
                    time.sleep(600)
                return backward(*arguments, **keywords)

            CpuKernel.backward = stalling  # type: ignore[method-assign]
        attend(context)


class Job:
    """The processes of one job, each of which plays the same scenario."""

    def __init__(self, members: list[tuple[Any, Connection]]) -> None:
        self._members = members

    def replies(self, ranks: list[int]) -> dict[int, tuple[str, str, float]]:
        """For each rank: the kind of its error, the message, and after how many seconds."""
        found = {}
        for rank in ranks:
            connection = self._members[rank][1]
            assert connection.poll(300), f"rank {rank} hangs"
            found[rank] = connection.recv()
        return found

    def ends_by_itself(self, rank: int) -> bool:
        process, connection = self._members[rank]
        connection.send("leave")
        process.join(SLACK_SECONDS)
        return process.exitcode == 0

    def exit_code(self, rank: int) -> int | None:
        process = self._members[rank][0]
        process.join(SLACK_SECONDS)
        return process.exitcode


type Scenario = Callable[[BurstContext], None]


def in_a_context(scenario: Scenario, config: BurstConfig) -> Callable[[], None]:
    context = BurstContext.create(config)
    return lambda: scenario(context)


def member(
    prepare: Callable[..., Callable[[], None]],
    arguments: tuple[Any, ...],
    rank: int,
    ranks: int,
    store: str,
    group_seconds: float,
    backend: str | None,
    connection: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=group_seconds),
    )
    action = prepare(*arguments)
    began = time.monotonic()
    try:
        action()
        connection.send(("no error", "", 0.0))
    except Exception as error:
        connection.send((type(error).__name__, str(error), time.monotonic() - began))
    connection.recv()  # whoever leaves breaks connections: stay until everybody has answered


@contextmanager
def job(
    store: Path,
    ranks: int,
    prepare: Callable[..., Callable[[], None]],
    *arguments: Any,
    group_seconds: float = 300,
    backend: str | None = "gloo",
) -> Iterator[Job]:
    """Start the ranks of a job; each makes its action and carries it out."""
    server = forkserver()
    members = []
    for rank in range(ranks):
        here, there = server.Pipe()
        process = server.Process(
            target=member,
            args=(prepare, arguments, rank, ranks, str(store), group_seconds, backend, there),
            daemon=True,
        )
        process.start()
        there.close()
        members.append((process, here))
    try:
        yield Job(members)
    finally:
        for process, _ in members:
            process.kill()
            process.join()


def test_when_a_rank_is_killed_its_neighbours_name_it_and_nobody_stays_behind(
    tmp_path: Path,
) -> None:
    config = BurstConfig(timeout_seconds=5)
    with job(tmp_path / "store", 3, in_a_context, die_in_the_first_tile, config) as broken_job:
        survivors = broken_job.replies([0, 2])
        for rank, (kind, text, seconds) in survivors.items():
            assert kind == "CommunicationError", text
            named = NAMED.match(text)
            assert named and int(named["rank"]) == rank, text
            assert seconds < 5 + SLACK_SECONDS
        # Rank 2 receives from the dead one; what was sent before the end may still arrive.
        assert re.search("could not receive kv of CP rank [01] from rank 1", survivors[2][1])
        assert broken_job.exit_code(BROKEN) == -signal.SIGKILL
        assert all(map(broken_job.ends_by_itself, survivors))


def test_when_a_rank_stalls_the_one_that_waits_for_it_gives_up_in_time(tmp_path: Path) -> None:
    config = BurstConfig(timeout_seconds=2)
    with job(tmp_path / "store", 3, in_a_context, stall, config) as broken_job:
        found = broken_job.replies([0, 1, 2])
        assert found[BROKEN][0] == "no error"
        for rank in (0, 2):
            kind, text, seconds = found[rank]
            assert kind == "CommunicationError", text
            assert text.startswith(f"rank {rank}, attention call 2 of q (1, 4, 2, 8)"), text
            assert text.endswith("rank 1 did not come within 2 s")
            assert 1.9 < seconds < 2 + SLACK_SECONDS
        assert all(map(broken_job.ends_by_itself, found))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_the_time_limit_is_kept_on_a_group_that_names_no_backend_or_one_a_device(
    tmp_path: Path, backend: str | None
) -> None:
    """As torch's own `init_process_group()` makes it."""
    scenario = in_a_context, stall_before_a_message, BurstConfig(timeout_seconds=2)
    with job(tmp_path / "store", 2, *scenario, group_seconds=20, backend=backend) as broken_job:
        ((kind, text, seconds),) = broken_job.replies([0]).values()
        assert kind == "CommunicationError" and "forward step 0: could not" in text, text
        assert 1.9 < seconds < 2 + 16


QUERY_ON_TWO_NODES = BurstConfig(
    timeout_seconds=2, backward="query", topology="double", ranks_per_node=2
)


def test_a_stall_in_a_query_ring_on_two_nodes_is_named_with_step_peer_and_item(
    tmp_path: Path,
) -> None:
    scenario = StallInABackward(tiles=0)
    with job(tmp_path / "store", 4, in_a_context, scenario, QUERY_ON_TWO_NODES) as broken_job:
        found = broken_job.replies([0, 2, 3])
        for rank, (kind, text, seconds) in found.items():
            named = NAMED.match(text)
            assert kind == "CommunicationError" and named and int(named["rank"]) == rank, text
            assert 1.9 < seconds < 2 + SLACK_SECONDS
        # Within the node a block that came from the other one, between nodes a gradient.
        assert (
            "rank 0, backward step 2: could not receive query of CP rank 3 from rank 1"
            in found[0][1]
        )
        assert (
            "rank 3, backward step 5: could not receive d_query of CP rank 3 from rank 1"
            in found[3][1]
        )


@pytest.mark.slow
def test_when_a_rank_never_calls_at_all_the_others_give_up_in_time(tmp_path: Path) -> None:
    scenario = in_a_context, stall_in_the_first_call, BurstConfig(timeout_seconds=2)
    with job(tmp_path / "store", 3, *scenario, group_seconds=30) as broken_job:
        for kind, text, _ in broken_job.replies([0, 2]).values():
            assert kind == "CommunicationError", text
            assert "1 did not come within 2 s" in text


def make_two_contexts(timeout_seconds: float) -> Callable[[], None]:
    """Two context-parallel groups, one of which never makes its context."""
    groups = [dist.new_group(range(first, first + 2)) for first in (0, 2)]

    def make() -> None:
        if dist.get_rank() < 2:
            BurstContext.create(BurstConfig(timeout_seconds=timeout_seconds), groups[0])

    return make


def test_when_another_group_makes_no_context_this_one_gives_up_in_time(tmp_path: Path) -> None:
    # New process groups need all ranks of the job.
    with job(tmp_path / "store", 4, make_two_contexts, 2) as broken_job:
        found = broken_job.replies([0, 1, 2, 3])
        assert [found[rank][0] for rank in (2, 3)] == ["no error"] * 2
        for rank in (0, 1):
            kind, text, seconds = found[rank]
            assert kind == "CommunicationError", text
            what = "could not make process groups with the whole job"
            assert text.startswith(f"rank {rank}, at the start: {what}")
            assert seconds < 2 + SLACK_SECONDS
            assert text.endswith("rank 2, 3 did not come within 2 s")


class OneHandle:
    """What NCCL returns for a batch: one work for all of its messages."""

    def __init__(self, works: list[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:  # with a time limit the host would block
        for work in self.works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


def watched_names(team: Team, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    context = team.context(BurstConfig(backward="query"))
    start, names = comm.post_together, []

    class Recorder:
        def watch(self, name: object, is_completed: Callable[[], bool], limit: Limit) -> None:
            assert is_completed() in (True, False) and limit() == context.config.timeout_seconds
            names.append(str(name))

    monkeypatch.setattr(comm, "post_together", lambda *batch: [OneHandle(start(*batch))])
    context.communicator._watchdog = Recorder()
    context.communicator._by_gloo = {}
    attend(context)
    return names


def watched(team: Team) -> list[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return watched_names(team, monkeypatch)


def test_as_on_nccl_each_batch_is_watched_under_the_names_of_its_messages(
    workers: WorkerPool,
) -> None:
    for rank, names in enumerate(workers.run(2, watched)):
        me, peer, other = 6 + rank, 7 - rank, 1 - rank
        assert names == [
            f"rank {me}, {step}: receive {arrives} of CP rank {owner} from rank {peer}; "
            f"send {leaves} of CP rank {sender} to rank {peer}"
            for step, arrives, owner, leaves, sender in (
                ("forward step 0", "kv", other, "kv", rank),
                ("backward step 0", "query", other, "query", rank),
                ("backward step 2", "partial d_query", rank, "partial d_query", other),
            )
        ]
