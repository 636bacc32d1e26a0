"""Keeps a second job out of a directory, and says who the first is.

The lock is the kernel's (flock), so it ends with the process that holds it, however that ends; on a
shared file system the server ends it some time after a machine is gone. The file says who holds it.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

NAME = ".megatron-burst.lock"
PAUSE_SECONDS = 0.5


class InUseError(ValueError):
    """Another job uses the directory; the message says which, where and since when."""


@contextmanager
def held(folder: Path, *, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a directory meanwhile, as `hold` does."""
    lock = hold(folder, say=say)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def hold(folder: Path, *, patience: float = 0.0, say: Callable[[str], None]) -> int | None:
    """Hold a directory, which is made, until this process ends or closes what is returned.

    A later start of a Slurm job that is put into the queue again takes it from an earlier one.
    Where the file system has no locks, a line says so.

    Args:
        folder: the directory.
        patience: how many seconds to wait for a holder that may be about to end.
        say: is told what a user should know.

    Raises:
        InUseError: somebody else holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _hold(folder / NAME, patience, say)
    except OSError as error:
        say(f"{folder} is not kept from other jobs, it cannot be locked: {error}")
    return None


def _hold(file: Path, patience: float, say: Callable[[str], None]) -> int:
    lock, waiting = os.open(file, os.O_RDWR | os.O_CREAT, 0o666), 0.0
    while not _taken(lock, file):
        holder = _holder(lock)
        who = "a process on {host}, {pid}, since {since}{job}".format(**holder)
        if _is_earlier_start(holder):
            say(f"{file.parent} was held by {who}, an earlier start of this job")
            file.unlink(missing_ok=True)
        elif not waiting:
            waiting = time.monotonic()
            if patience:
                say(f"{file.parent} is in use by {who}; waits up to {patience:g} s for its end")
        elif time.monotonic() > waiting + patience:
            raise InUseError(
                f"{file.parent} is in use by {who}: end it or choose another directory; if that "
                f"machine is gone, delete {file}"
            )
        else:
            time.sleep(PAUSE_SECONDS)
        os.close(lock)  # the file may have been replaced, by an earlier start's heir or by hand
        lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(_this_process()).encode(), 0)
    return lock


def _taken(lock: int, file: Path) -> bool:
    """Whether the lock is ours, and of the file that is there."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(lock).st_ino == file.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _this_process() -> dict[str, str]:
    return {
        "host": platform.node(),
        "pid": str(os.getpid()),
        "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "slurm": os.environ.get("SLURM_JOB_ID", ""),
        "start": os.environ.get("SLURM_RESTART_COUNT") or "0",
    }


def _holder(lock: int) -> dict[str, str]:
    """Return what the holder wrote; it may be about to."""
    try:
        written = json.loads(os.pread(lock, 4096, 0))
    except ValueError:
        written = {}
    holder = {name: str(written.get(name, "?")) for name in _this_process()}
    holder["job"] = f", of Slurm job {written['slurm']}" if written.get("slurm") else ""
    return holder


def _is_earlier_start(holder: dict[str, str]) -> bool:
    """Whether it is an earlier start of this Slurm job, which Slurm has ended."""
    own = _this_process()
    again = bool(own["slurm"]) and own["slurm"] == holder["slurm"]
    return again and holder["start"].isdecimal() and int(own["start"]) > int(holder["start"])
