"""Ends a rank that fails: the first of a job says why in full, those that it takes along in a line.

A failure on one rank makes every other fail in its next message, and a wrong argument fails on all;
as many tracebacks, one through another, would hide the one that matters.
"""

import datetime
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

_STORE_SECONDS = 5  # to reach the store at which the ranks of the job met


@contextmanager
def reported() -> Iterator[None]:
    """Run a launcher's body; if it fails, report that once a job and exit with a status above 0.

    `sys.exit()` without a status, which is how Megatron gives up after printing an error, counts as
    a failure, too; but so ends a conversion by --ckpt-convert-format that succeeded.
    """
    try:
        yield
    except SystemExit as leaving:
        converts = any(word.split("=")[0] == "--ckpt-convert-format" for word in sys.argv)
        if isinstance(leaving.code, int) or (leaving.code is None and converts):
            raise
        _report(str(leaving.code or "Megatron ended the run; its error stands above"), "")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        message = f"{type(error).__name__}: {error}"
        _report(message, "".join(traceback.format_exception(error)))
        # Destructors of what was half made would only complain about that.
        sys.unraisablehook = lambda _: None
        raise SystemExit(1) from None


def _report(message: str, details: str) -> None:
    rank, message = os.environ.get("RANK", "0"), message.removeprefix("megatron_burst: ")
    first = _first_to_fail(rank)
    if first == rank:
        text = f"{details}megatron_burst: rank {rank} failed: {message}\n"
    else:
        text = f"megatron_burst: rank {rank} ends, {first}: {' '.join(message.split())[:500]}\n"
    sys.stdout.flush()
    sys.stderr.write(text)  # at once, so that no other rank's text comes between
    sys.stderr.flush()


def _first_to_fail(rank: str) -> str:
    """Return `rank` if it is the first of the job to ask this, else what to say of the one that is.

    The ranks ask the store at which they met. Before that is there they ask the folder that
    torchrun keeps for a node's errors, so each node has a first; with neither, each rank is.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return rank
    from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if from_torchrun or dist.is_initialized():
        try:
            first = _first_in_store(rank)
        except RuntimeError:
            return "the rank that others met at is gone"
    else:
        first = _first_on_node(rank)
    return rank if first == rank else f"rank {first} failed"


def _first_in_store(rank: str) -> str:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=datetime.timedelta(seconds=_STORE_SECONDS),
    )
    key = f"megatron_burst/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return store.compare_set(key, "", rank).decode()


def _first_on_node(rank: str) -> str:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # ATTEMPT/LOCAL_RANK/error.json
    if not error_file:
        return rank
    link = Path(error_file).parents[1] / "megatron_burst_failed"
    try:
        link.symlink_to(rank)  # appears at once and whole, for one rank alone
    except FileExistsError:
        return os.readlink(link)
    return rank
