"""Ends a rank that fails: the first of a job says why in full, those that it takes along in a line.

A failure on one rank makes every other fail in its next message, and a wrong argument fails on all;
as many tracebacks, one through another, would hide the one that matters.
"""

import datetime
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch.distributed as dist

_STORE_SECONDS = 5  # to reach the store at which the ranks of the job met


class Status(int):
    """An exit status above 0 that says why, for code that hands it on to `sys.exit`."""

    reason: str

    def __new__(cls, value: int, reason: str) -> Self:
        """Return the number with its reason."""
        status = super().__new__(cls, value)
        status.reason = reason
        return status


@contextmanager
def reported() -> Iterator[None]:
    """Run a launcher's body; if it fails, report that once a job and exit with a status above 0.

    `sys.exit()` without a status, which is how Megatron gives up after printing an error, counts as
    a failure, too; but so ends a conversion by --ckpt-convert-format that succeeded.
    """
    try:
        yield
    except SystemExit as leaving:
        if isinstance(leaving.code, Status):
            _report(leaving.code.reason, "")
        converts = any(word.split("=")[0] == "--ckpt-convert-format" for word in sys.argv)
        if isinstance(leaving.code, int) or (leaving.code is None and converts):
            raise
        _report(str(leaving.code or "Megatron ended the run; its error stands above"), "")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        message = f"{type(error).__name__}: {str(error) or _asserted(error)}"
        _report(message, "".join(traceback.format_exception(error)))
        # Destructors of what was half made would only complain about that.
        sys.unraisablehook = lambda _: None
        raise SystemExit(1) from None


def _asserted(error: BaseException) -> str:
    """Return the statement that failed, for an error without a text, as an assertion's."""
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return ""
    last = frames[-1]
    lines = range(last.lineno or 1, (last.end_lineno or last.lineno or 1) + 1)
    code = " ".join(linecache.getline(last.filename, number).strip() for number in lines)
    return f"{code} ({last.filename}:{last.lineno})"


def _report(message: str, details: str) -> None:
    rank, message = os.environ.get("RANK", "0"), message.removeprefix("megatron_burst: ")
    try:
        first = _first_to_fail(rank)
    except (RuntimeError, OSError, KeyError, ValueError):  # in doubt this is the one report
        message += " (the store of the ranks does not answer: another may have failed before)"
        first = rank
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
    RuntimeError if the store cannot be reached.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return rank
    from_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if from_torchrun or dist.is_initialized():
        first = _first_in_store(rank)
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
