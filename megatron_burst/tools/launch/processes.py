"""Processes that are started, told to end and waited for, and a log of what they print."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.1
TERMINATED = 128 + signal.SIGTERM
STANDARD_ERROR = 2


class LaunchError(Exception):
    """What a user has to change before anything can be launched."""


class Signals:
    """What this process was told: to end, or that its time is soon over.

    It is told to end by SIGTERM, SIGINT or SIGHUP, or by the end of its input; of its time by
    SIGUSR1, or by a line of input. The handlers only set flags that loops look at, so that no
    signal comes at a wrong time: before there is a process to tell, twice, or while it ends.
    """

    def __init__(self, *, with_input: bool = False) -> None:
        self.ended = self.warned = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGUSR1, self._warn)
        if with_input:
            threading.Thread(target=self._read, daemon=True).start()

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.ended = True

    def _warn(self, _number: int, _frame: FrameType | None) -> None:
        self.warned = True

    def _read(self) -> None:
        while os.read(0, 4096):
            self.warned = True
        self.ended = True


def warn(pid: int) -> None:
    """Tell a process that its time is soon over."""
    os.kill(pid, signal.SIGUSR1)


def supervise(
    command: Sequence[str],
    signals: Signals,
    *,
    output: int | None = None,
    environment: Mapping[str, str] | None = None,
    hold_input: bool = False,
    on_warning: Callable[[int], None] = warn,
) -> int:
    """Run a command to its end and return its status, as a shell counts it.

    It runs in a session of its own: it gets one SIGTERM, from here, and no second one from a
    terminal or from Slurm, which would interrupt torchrun while it ends its ranks.

    Args:
        command: the program and its arguments.
        signals: what this process is told; it is passed on.
        output: the descriptor for what the command prints; by default it shares this process's.
        environment: by default this process's.
        hold_input: whether its input stays open until this process ends, instead of being empty.
        on_warning: what is done with the number of the process when its time is soon over.
    """
    if signals.ended:
        return TERMINATED
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if hold_input else subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )
    told = False
    while process.poll() is None:
        if signals.ended and not told:
            told = True
            process.terminate()
        elif signals.warned:
            signals.warned = False
            on_warning(process.pid)
        time.sleep(POLL_SECONDS)
    return status_of(process)


def status_of(process: subprocess.Popen[bytes]) -> int:
    """Return the status of a process that has ended, as a shell counts it: 128 + a signal."""
    code = process.returncode
    return code if code >= 0 else 128 - code


def say(text: str, *, who: str = "launch", output: int = STANDARD_ERROR) -> None:
    """Print a line at once; nobody may be left to read it."""
    with suppress(OSError):
        os.write(output, f"{who}: {text}\n".encode())


def run_logged(run: Callable[[int], int], directory: Path) -> int:
    """Run a function and return its status, which goes to directory/status, too.

    What is written to the descriptor that it gets is shown and added to directory/log.txt.
    """
    # It ends after all that write to it, whatever signals come.
    command = ["tee", "-ai", "--", str(directory / "log.txt")]
    tee = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    status = run(tee.stdin.fileno())
    tee.stdin.close()
    tee.wait()
    (directory / "status").write_text(f"{status}\n")
    if status:
        say(f"ended with status {status}; the log is {directory / 'log.txt'}")
    return status
