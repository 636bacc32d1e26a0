"""Processes that are started, told to end and waited for, and a log of what they print."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.1
TERMINATED = 128 + signal.SIGTERM
STANDARD_ERROR = 2

type Commands = Sequence[tuple[str, Sequence[str]]]  # by the name of where they run


class Signals:
    """Whether this process was told to end: by SIGTERM, SIGINT or SIGHUP, or by its input's end.

    The handler only sets a flag that loops look at, so that no signal comes at a wrong time: before
    there is a process to tell, twice, or while it ends. SIGUSR1, by which Slurm tells every process
    of a job that its time is soon over, is ignored here and, as they inherit that, by torchrun and
    by ranks without a handler of their own.
    """

    def __init__(self, *, with_input: bool = False) -> None:
        self.ended = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._end)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if with_input:
            threading.Thread(target=self._read, daemon=True).start()

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self.ended = True

    def _read(self) -> None:
        while os.read(0, 4096):
            pass
        self.ended = True


def supervise(
    commands: Commands,
    signals: Signals,
    *,
    by_input: bool = False,
    output: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run commands to their ends; return the status of the first that failed (128 + a signal).

    When one fails, or this process is told to end, all are. Each has a session of its own: it gets
    one SIGTERM, from here, and no second one from a terminal or from Slurm, which would interrupt
    torchrun while it ends its ranks.

    Args:
        commands: and the names of where they run.
        signals: what this process is told; it is passed on.
        by_input: whether they are told by the end of their input instead of SIGTERM. It is a pipe
            that only this process writes to, so it ends with this process, however that ends.
        output: the descriptor for what they print; by default they share this process's.
        environment: by default this process's.
    """
    if signals.ended:
        return TERMINATED
    running = {
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE if by_input else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        ): name
        for name, command in commands
    }
    failed, told = 0, False
    while running:
        for process in [one for one in running if one.poll() is not None]:
            name, code = running.pop(process), process.returncode
            if code and not failed:
                failed = code if code > 0 else 128 - code
                if len(commands) > 1:
                    say(f"{name} ended with status {failed}, so all nodes are ended", output=output)
        if (failed or signals.ended) and not told:
            told = True
            for process in running:
                process.stdin.close() if process.stdin else process.terminate()
        time.sleep(POLL_SECONDS)
    return failed


def say(text: str, *, who: str = "launch", output: int | None = None) -> None:
    """Print a line at once; nobody may be left to read it."""
    with suppress(OSError):
        os.write(STANDARD_ERROR if output is None else output, f"{who}: {text}\n".encode())


def run_logged(commands: Commands, directory: Path, *, by_input: bool) -> int:
    """Supervise commands and return the status, which goes to directory/status, too.

    What they print is shown and added to directory/log.txt.
    """
    signals = Signals()
    # It ends after all that write to it, whatever signals come.
    tee_command = ["tee", "-ai", "--", str(directory / "log.txt")]
    tee = subprocess.Popen(tee_command, stdin=subprocess.PIPE, start_new_session=True)
    assert tee.stdin is not None
    status = supervise(commands, signals, by_input=by_input, output=tee.stdin.fileno())
    tee.stdin.close()
    tee.wait()
    (directory / "status").write_text(f"{status}\n")
    if status:
        say(f"ended with status {status}; the log is {directory / 'log.txt'}")
    return status
