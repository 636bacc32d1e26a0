"""Runs a function on every rank of a group: processes of this machine, or those of torchrun."""

import datetime
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from shaped_links import NIC, enter

PATIENCE_SECONDS = 120.0
_LIMIT = datetime.timedelta(seconds=PATIENCE_SECONDS)


def launch[Result](
    function: Callable[..., Result], ranks: int, *arguments: Any, namespaces: Sequence[str] = ()
) -> list[Result]:
    """Return `function(*arguments)` of ranks over gloo, each in a fresh process with one thread.

    Args:
        function: of a module that can be imported.
        ranks: how many.
        arguments: the same for all.
        namespaces: network namespaces of the ranks, see `shaped_links`; none is plain loopback.

    Raises:
        RuntimeError: a rank ended without a result.
    """
    context = multiprocessing.get_context("forkserver")  # torch is imported once
    context.set_forkserver_preload(["megatron_burst.attention.autograd"])
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank, namespace in enumerate(namespaces or [""] * ranks):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                told = (rank, ranks, namespace, f"{directory}/store", theirs, function, arguments)
                processes.append(context.Process(target=_be_rank, args=told, daemon=True))
                processes[-1].start()
                theirs.close()
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError("a rank ended without a result; its error is above") from None
        finally:
            for process in processes:
                process.kill()
                process.join()


def _be_rank(
    rank: int,
    ranks: int,
    namespace: str,
    store: str,
    parent: Connection,
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """Be one rank until the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if namespace:
        enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = NIC if namespace else "lo"
    torch.set_num_threads(1)
    file = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=ranks, timeout=_LIMIT)
    parent.send(function(*arguments))
    parent.poll(None)  # a process that leaves breaks the connections of those that have not ended


def join(device: str) -> None:
    """Join the group of torchrun's ranks."""
    if device == "cpu":
        dist.init_process_group("gloo", timeout=_LIMIT)
        return
    gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", timeout=_LIMIT, device_id=gpu)
