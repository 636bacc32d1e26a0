"""A rank that dies, stalls or disagrees: every other one says what failed. (fast tier)"""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.comm import CommunicationError, Communicator, PendingTransfers
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.plan import Item, Kind, Step, Transfer
from tests.workers import WorkerPool

RANKS, BROKEN = 3, 1
SLACK_SECONDS = 20  # for a machine with more to do
NAMED = re.compile(
    r"rank (?P<rank>\d), (forward|backward) step (?P<step>\d): could not "
    r"(receive|send) (kv|d_kv) of rank \d (from|to) rank (?P<peer>\d)"
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
        CpuKernel.forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    attend(context)


def stall_in_the_first_call(context: BurstContext) -> None:
    if context.rank != BROKEN:
        attend(context)


def member(
    scenario: Callable[[BurstContext], None],
    rank: int,
    store: str,
    timeout_seconds: float,
    group_seconds: float,
    connection: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=group_seconds),
    )
    context = BurstContext.create(BurstConfig(timeout_seconds=timeout_seconds))
    began = time.monotonic()
    try:
        scenario(context)
        connection.send(("no error", "", 0.0))
    except Exception as error:
        connection.send((type(error).__name__, str(error), time.monotonic() - began))
    connection.recv()  # whoever leaves breaks connections: stay until everybody has answered


@contextmanager
def processes(
    scenario: Callable[[BurstContext], None],
    store: Path,
    *,
    timeout_seconds: float,
    group_seconds: float = 60,
) -> Iterator[list[tuple[Any, Connection]]]:
    server = multiprocessing.get_context("forkserver")  # torch is imported once for all
    server.set_forkserver_preload(["megatron_burst"])
    members = []
    for rank in range(RANKS):
        here, there = server.Pipe()
        arguments = (scenario, rank, str(store), timeout_seconds, group_seconds, there)
        process = server.Process(target=member, args=arguments, daemon=True)
        process.start()
        there.close()
        members.append((process, here))
    try:
        yield members
    finally:
        for process, _ in members:
            process.kill()
            process.join()


def replies(members: list[tuple[Any, Connection]], ranks: list[int]) -> dict[int, Any]:
    found = {}
    for rank in ranks:
        assert members[rank][1].poll(60), f"rank {rank} hangs"
        found[rank] = members[rank][1].recv()
    return found


def ends_by_itself(member: tuple[Any, Connection]) -> bool:
    process, connection = member
    connection.send("leave")
    process.join(SLACK_SECONDS)
    return process.exitcode == 0


def test_when_a_rank_is_killed_its_neighbours_name_it_and_nobody_stays_behind(
    tmp_path: Path,
) -> None:
    with processes(die_in_the_first_tile, tmp_path / "store", timeout_seconds=5) as members:
        survivors = replies(members, [0, 2])
        for rank, (kind, text, seconds) in survivors.items():
            assert kind == "CommunicationError", text
            named = NAMED.match(text)
            assert named and int(named["rank"]) == rank, text
            assert seconds < 5 + SLACK_SECONDS
        # Rank 2 receives from the dead one; what was sent before the end may still arrive.
        assert re.search("could not receive kv of rank [01] from rank 1", survivors[2][1])
        members[BROKEN][0].join(SLACK_SECONDS)
        assert members[BROKEN][0].exitcode == -signal.SIGKILL
        assert all(ends_by_itself(members[rank]) for rank in survivors)


def test_when_a_rank_stalls_the_one_that_waits_for_it_gives_up_in_time(tmp_path: Path) -> None:
    with processes(stall, tmp_path / "store", timeout_seconds=2) as members:
        found = replies(members, [0, 1, 2])
        assert found[BROKEN][0] == "no error"
        for rank in (0, 2):
            kind, text, seconds = found[rank]
            assert kind == "CommunicationError" and NAMED.match(text), text
            assert 1.9 < seconds < 2 + SLACK_SECONDS
        assert "rank 2, forward step 0: could not receive kv of rank 1 from rank 1" in found[2][1]
        assert all(map(ends_by_itself, members))


def test_when_a_rank_never_calls_at_all_the_others_give_up_in_time(tmp_path: Path) -> None:
    options = {"timeout_seconds": 2, "group_seconds": 6}
    with processes(stall_in_the_first_call, tmp_path / "store", **options) as members:
        for kind, text, _ in replies(members, [0, 2]).values():
            assert kind == "CommunicationError", text


def test_transfers_are_waited_for_once() -> None:
    arrived = {Item(Kind.KV, 1): (torch.zeros(1),)}
    pending = PendingTransfers([], arrived, "forward step 0", None)
    assert pending.wait() == arrived
    with pytest.raises(RuntimeError, match="waited for already"):
        pending.wait()


def wait_twice(group: dist.ProcessGroup) -> str:
    rank, peer = group.rank(), 1 - group.rank()
    block = (torch.full((3,), float(rank)),)
    step = Step(
        receives=(Transfer(Item(Kind.KV, peer), peer),),
        sends=(Transfer(Item(Kind.KV, rank), peer),),
    )
    pending = Communicator(group, 30).post(
        step, "step 0", {Item(Kind.KV, rank): block}, {Kind.KV: block}
    )
    (received,) = pending.wait()[Item(Kind.KV, peer)]
    assert received.tolist() == [peer] * 3
    try:
        pending.wait()
    except RuntimeError as error:
        assert not isinstance(error, CommunicationError)
        return str(error)
    return "no error"


def test_transfers_that_travelled_are_waited_for_once(workers: WorkerPool) -> None:
    assert workers.run(2, wait_twice) == ["these transfers have been waited for already"] * 2


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "no error"


def disagree_on_the_configuration(group: dist.ProcessGroup) -> str:
    config = BurstConfig(kernel="cpu" if group.rank() == 1 else "auto")
    return error_of(lambda: BurstContext.create(config, group))


def disagree_on_a_call(group: dist.ProcessGroup, what: str) -> str:
    context = BurstContext.create(BurstConfig(), group)
    odd = group.rank() == 1
    tokens = 8 if what == "tokens" and odd else 4
    heads = 4 if what == "heads" and odd else 2
    dtype = torch.bfloat16 if what == "dtype" and odd else torch.float32
    mask = Mask.full() if what == "mask" and odd else Mask.causal()
    q, k, v = (torch.zeros(1, tokens, heads, 8, dtype=dtype) for _ in range(3))
    return error_of(lambda: ring_attention(q, k, v, context, mask=mask))


def listed_by_rank(messages: list[str], what: str) -> list[str]:
    """The values in the message, which must be the same on every rank, in the job's numbers."""
    assert len(set(messages)) == 1
    first, *lines = messages[0].splitlines()
    assert first == f"the context-parallel ranks disagree on {what}:"
    named = [re.fullmatch(r"  rank (\d): (.*)", line) for line in lines]
    assert [int(line[1]) for line in named if line] == [5, 6, 7]  # the pool's last three
    return [line[2] for line in named if line]


def test_ranks_that_disagree_on_the_configuration_all_say_so(workers: WorkerPool) -> None:
    values = listed_by_rank(workers.run(3, disagree_on_the_configuration), "the configuration")
    assert ["kernel='cpu'" in value for value in values] == [False, True, False]
    assert ["kernel='auto'" in value for value in values] == [True, False, True]


@pytest.mark.parametrize(
    ("what", "usual", "odd"),
    [
        ("tokens", "k (1, 4, 2, 8)", "k (1, 8, 2, 8)"),
        ("heads", "q (1, 4, 2, 8)", "q (1, 4, 4, 8)"),
        ("dtype", "torch.float32", "torch.bfloat16"),
        ("mask", "Mask(is_causal=True)", "Mask(is_causal=False)"),
    ],
)
def test_ranks_that_disagree_on_a_call_all_say_so(
    workers: WorkerPool, what: str, usual: str, odd: str
) -> None:
    values = listed_by_rank(workers.run(3, disagree_on_a_call, what), "the shapes or the mask")
    assert [usual in value for value in values] == [True, False, True]
    assert [odd in value for value in values] == [False, True, False]
