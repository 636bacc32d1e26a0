"""Who holds a directory is said, and nobody who is gone holds it. (fast tier)"""

import errno
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from megatron_burst.transport.lock import NAME, InUseError, hold

HOLDER = """
import sys, time
from pathlib import Path
from megatron_burst.transport.lock import hold
hold(Path(sys.argv[1]), say=print)
print("held", flush=True)
time.sleep(600)
"""


@contextmanager
def held(folder: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Another process holds it until the end, or until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | variables
    ) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_job_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    folder, said = tmp_path / "new" / "folder", list[str]()
    with held(folder, SLURM_JOB_ID="42") as other:
        who = rf"a process on \S+, {other.pid}, since 2\d+-\d\d-\d\d .* UTC, of Slurm job 42"
        with pytest.raises(InUseError, match=f"^{folder} is in use by {who}: end it or "):
            hold(folder, patience=0.3, say=said.append)
        (line,) = said
        assert re.search(f"in use by {who}; waits up to 0.3 s", line)
        other.kill()
        hold(folder, patience=10, say=said.append)  # which it leaves by itself
    with pytest.raises(InUseError, match=f"process on .*, {os.getpid()}, since [^,]*: end it"):
        hold(folder, say=said.append)


def test_a_lock_of_a_file_that_was_replaced_is_none(tmp_path: Path) -> None:
    """Its heir has the new one: an earlier start's, or whoever came after it was deleted."""
    said, folder = list[str](), tmp_path
    with held(folder) as first:

        def replaced(line: str) -> None:
            said.append(line)
            (folder / NAME).unlink()
            heir.enter_context(held(folder))
            first.kill()

        with ExitStack() as heir, pytest.raises(InUseError):
            hold(folder, patience=1, say=replaced)
    assert len(said) == 1


def test_a_later_start_of_a_job_takes_what_an_earlier_one_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the node of the earlier start is gone and the file server does not know."""
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    said = list[str]()
    with held(tmp_path, SLURM_JOB_ID="42", SLURM_RESTART_COUNT="1"):
        for start in ("", "1"):  # another step of the same start
            monkeypatch.setenv("SLURM_RESTART_COUNT", start)
            with pytest.raises(InUseError):
                hold(tmp_path, say=said.append)
        assert not said
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        started = time.monotonic()
        hold(tmp_path, patience=60, say=said.append)
        assert time.monotonic() < started + 5
        assert "an earlier start of this job" in said[0]
        with pytest.raises(InUseError):
            hold(tmp_path, say=said.append)


def test_where_nothing_can_be_locked_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks")

    monkeypatch.setattr(fcntl, "flock", fails)
    said = list[str]()
    hold(tmp_path, say=said.append)
    (line,) = said
    assert (
        line == f"{tmp_path} is not kept from other jobs, it cannot be locked: [Errno 37] No locks"
    )
    (tmp_path / NAME).unlink()
