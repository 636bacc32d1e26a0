"""Ends what a job leaves behind, also where the process that supervises it is killed.

`processes.supervise` starts it as a script of its own, so that it is there in hundredths of a
second, small, and no target of whatever ends the job. Its input is a pipe that only the supervising
process writes to: when that ends, every process with the job's mark in its environment is killed.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress

PAUSE_SECONDS = 0.05
MOMENT_SECONDS = 2.0  # for a reader that is slow
LONGEST = 60.0  # a process that a broken disk or device holds does not even end by SIGKILL


def main() -> None:
    """Wait for the end of the input, then for that of all that has the mark, the only argument."""
    told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    for number in told:  # which a terminal and Slurm send to every process
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    mark, known, quiet = sys.argv[1].encode(), set[int](), 0
    deadline = time.monotonic() + LONGEST
    # Twice: a process has no environment for a moment while it is being started.
    while quiet < 2 and time.monotonic() < deadline:
        left = _marked(mark)
        quiet = 0 if left else quiet + 1
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                if pid not in known:
                    _say(f"guard: ended process {pid}, which outlived its launcher\n")
        known |= set(left)
        time.sleep(PAUSE_SECONDS)


def _marked(mark: bytes) -> list[int]:
    """Return the processes that have the mark in their environment."""
    pids = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # or it has ended
            if mark in file.read().split(b"\0"):
                pids.append(int(pid))
    return pids


def _say(text: str) -> None:
    with suppress(OSError):  # nobody may be left to read it
        if select.select((), [2], (), MOMENT_SECONDS)[1]:
            os.write(2, text.encode())


if __name__ == "__main__":
    main()
