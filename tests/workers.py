"""Processes with gloo groups of any size up to eight, started once and used by many tests."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MAX_RANKS = 8


class WorkerError(AssertionError):
    """A rank raised, died or did not answer."""


class WorkerPool:
    """Runs `function(group, *args)` on every rank of a group and returns the results by rank.

    A group of P takes the last P processes, so that ranks of the group and of the job differ.
    After an error the processes are in an unknown state and are replaced at the next call.
    """

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120
    ) -> list[Any]:
        if not self._workers:
            self._start()
        chosen = self._workers[MAX_RANKS - ranks :]
        for _, connection in chosen:
            _send(connection, (ranks, function, args))
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
        self._workers = []

    def _start(self) -> None:
        # Torch is imported once, in the server that the processes are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron_burst"])
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(MAX_RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(store), there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))


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
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, MAX_RANKS),
        rank=rank,
        world_size=MAX_RANKS,
        timeout=timedelta(seconds=60),
    )
    groups = {p: dist.new_group(range(MAX_RANKS - p, MAX_RANKS)) for p in range(1, MAX_RANKS + 1)}
    while True:
        try:
            ranks, function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            _send(connection, (True, function(groups[ranks], *args)))
        except Exception:
            _send(connection, (False, traceback.format_exc()))
