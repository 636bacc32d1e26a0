"""Processes with gloo groups of any size up to eight, started once and used by many tests."""

import gc
import itertools
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.cpu_platform.table import with_one_worker
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.transport.groups import Groups
from tests.poison import poison_message_memory

MAX_RANKS = 8
STARTING = 500.0  # seconds until all are there: what they import takes long on a busy machine
# What calls of tests import, imported once, in the server that all processes are forked from.
# Megatron asks a GPU about itself, which a process that is forked afterwards cannot use.
PRELOADED = ["tests.uncompiled", "tests.workers", "pytest", "hypothesis"]
PRELOADED += ["torch.fx.experimental.symbolic_shapes"]
MEGATRON = ["megatron.training.models.gpt", "torch._dynamo"]


def forkserver() -> ForkServerContext:
    """Starts the processes of all tests; it imports when it starts the first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(() if torch.cuda.is_available() else MEGATRON)])
    return context


class WorkerError(AssertionError):
    """A rank raised, died or did not answer."""


@dataclass(frozen=True)
class Team:
    """The processes that run one test, as each of them sees it."""

    group: dist.ProcessGroup
    groups: Groups

    @property
    def rank(self) -> int:
        return self.group.rank()

    def context(self, config: BurstConfig) -> BurstContext:
        return BurstContext.create(config, self.group, groups=self.groups)


type Teams = dict[tuple[int, ...], Team]


class WorkerPool:
    """Runs `function(team, *args)` on every rank of a team and returns the results by rank.

    A team is named by its processes, or by their number: of P these are the last P, so that ranks
    of its group and of the job differ.
    After an error the processes are in an unknown state and are replaced at the next call.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._teams: set[tuple[int, ...]] = set()  # whose groups exist

    def run(
        self,
        ranks: int | Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 240,
    ) -> list[Any]:
        members = tuple(range(MAX_RANKS - ranks, MAX_RANKS) if isinstance(ranks, int) else ranks)
        if not self._workers:
            self._start()
        if members not in self._teams:
            for _, connection in self._workers:  # torch makes groups with all processes
                _send(connection, (_make, members))
            self._teams.add(members)
        chosen = [self._workers[rank] for rank in members]
        for _, connection in chosen:
            _send(connection, (_call, members, function, args))
        replies = [_reply(connection, timeout) for _, connection in chosen]
        failures = [f"rank {r}:\n{text}" for r, (ok, text) in enumerate(replies) if not ok]
        if failures:
            self.close()
            raise WorkerError("\n".join(failures))
        return [value for _, value in replies]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers, self._teams = [], set()

    def _start(self) -> None:
        context = forkserver()
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(MAX_RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(store), there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))
        started = [_reply(connection, STARTING) for _, connection in self._workers]
        if not all(ok for ok, _ in started):
            self.close()
            raise WorkerError(f"the processes do not start: {started}")


def _send(connection: Connection, message: Any) -> None:
    # Plain pickle copies tensors; multiprocessing's own would share them by file descriptors.
    connection.send_bytes(pickle.dumps(message))


def _reply(connection: Connection, timeout: float) -> tuple[bool, Any]:
    if not connection.poll(timeout):
        return False, f"no answer within {timeout} s"
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return False, "the process died"


def _serve(rank: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not to be copied because the collector touches it
    # A device for all groups: those of all teams of a run woke more often than a core can.
    make: Any = dist.ProcessGroupGloo.__init__
    setattr(dist.ProcessGroupGloo, "__init__", with_one_worker(make))  # noqa: B010
    poison_message_memory()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, MAX_RANKS),
        rank=rank,
        world_size=MAX_RANKS,
        timeout=timedelta(seconds=STARTING),
    )
    teams: Teams = {}
    _send(connection, (True, None))  # what they are asked from now on has its own limit
    while True:
        try:
            job, *args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        job(teams, connection, *args)


def _make(teams: Teams, _: Connection, members: tuple[int, ...]) -> None:
    group, agreement, *channels = (dist.new_group(members) for _ in range(2 + 4))
    if dist.get_rank() in members:  # whom a later channel has messages for, an earlier one has not
        by_channel = dict(zip(Channel, itertools.cycle(channels), strict=False))
        teams[members] = Team(group, Groups(by_channel, agreement))


def _call(
    teams: Teams,
    connection: Connection,
    members: tuple[int, ...],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        _send(connection, (True, function(teams[members], *args)))
    except Exception:
        _send(connection, (False, traceback.format_exc()))
