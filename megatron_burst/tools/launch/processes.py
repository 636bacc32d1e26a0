"""Processes that are started, told to end and waited for, and a log of what they print."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_burst.tools.launch import guard

MARK = "BURST_MARK"  # in the environment of all that belongs to a job, of each start another
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 60.0  # torchrun kills ranks after 30
TERMINATED = 128 + signal.SIGTERM
STANDARD_ERROR = 2
GRACE_SECONDS = 10.0  # for the last lines, where this process is told to end

type Commands = Sequence[tuple[str, Sequence[str]]]  # by the name of where they run


class Signals:
    """Whether this process was told to end: by a signal that asks for it, or by its input's end.

    The handler only sets a flag that loops look at, so that no signal comes at a wrong time: before
    there is a process to tell, twice, or while it ends. SIGUSR1, by which Slurm tells every process
    of a job that its time is soon over, is ignored here and, as they inherit that, by torchrun and
    by ranks without a handler of their own.
    """

    def __init__(self, *, with_input: bool = False) -> None:
        self.ended = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's
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


class Reader:
    """A process that reads a pipe from here to its end; if it is killed, another one reads on.

    So nobody who writes to the pipe ever waits for a reader that is gone, or meets a broken pipe.
    """

    def __init__(self, *command: str, output: int | None = None) -> None:
        self._command, self._output = command, output
        self._input, self.pipe = os.pipe()
        self._start()

    def keep(self) -> None:
        """Start it again if it has ended."""
        if self._process.poll() is not None:
            self._start()

    def end(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Close the pipe here and wait until the process has read all of it, or `give_up`."""
        os.close(self.pipe)
        while (code := self._process.poll()) is None or code < 0:
            if give_up():
                self._process.kill()
                break
            if code is not None:
                self._start()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECONDS)
        os.close(self._input)

    def _start(self) -> None:
        # Without the mark of a job around this one: it outlives what it belongs to by a moment.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            self._command,
            stdin=self._input,
            stdout=self._output,
            stderr=self._output,
            env=environment,
            start_new_session=True,
        )


def supervise(
    commands: Commands,
    signals: Signals,
    *,
    output: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run commands to their ends; return the status of the first that failed (128 + a signal).

    When one fails, or this process is told to end, all are; what does not end within a minute is
    killed. Each has a session of its own: it gets one SIGTERM, from here, and no second one from a
    terminal or from Slurm, which would interrupt torchrun while it ends its ranks. What they leave
    behind on this machine a `guard` ends, in the end or if this process is killed.

    Args:
        commands: and the names of where they run.
        signals: what this process is told; it is passed on.
        output: the descriptor for what they print; by default they share this process's.
        environment: by default this process's.
    """
    if signals.ended:
        return TERMINATED
    mark = str(uuid.uuid4())
    guarding = Reader(sys.executable, "-IS", guard.__file__, f"{MARK}={mark}", output=output)
    try:
        marked = {**(environment or os.environ), MARK: mark}
        return _run(commands, signals, guarding, subprocess.DEVNULL, output, marked)
    finally:
        guarding.end()


def _run(
    commands: Commands,
    signals: Signals,
    reader: Reader,  # kept alive meanwhile
    given: int,  # their input
    output: int | None,
    environment: Mapping[str, str] | None = None,
) -> int:
    streams: dict[str, Any] = {"stdin": given, "stdout": output, "stderr": output}
    streams |= {"env": environment, "start_new_session": True}
    running = {subprocess.Popen(command, **streams): name for name, command in commands}
    failed, told, several = 0, 0.0, len(running) > 1
    while running:
        for process in [one for one in running if one.poll() is not None]:
            name, code = running.pop(process), process.returncode
            if code and not failed:
                failed = code if code > 0 else 128 - code
                if several:
                    say(f"{name} ended with status {failed}, so all nodes are ended", output=output)
        if (failed or signals.ended) and not told:
            told = time.monotonic()
            for process in running:
                process.stdin.close() if process.stdin else process.terminate()
        elif told and time.monotonic() > told + PATIENCE_SECONDS:
            for process in running:
                process.kill()
        reader.keep()
        if running:
            time.sleep(POLL_SECONDS)
    return failed


def say(text: str, *, who: str = "launch", output: int | None = None) -> None:
    """Print a line at once; who reads it may have left, or have stopped for more than a moment."""
    where = STANDARD_ERROR if output is None else output
    with suppress(OSError):
        if select.select((), [where], (), guard.MOMENT_SECONDS)[1]:
            os.write(where, f"{who}: {text}\n".encode())


def run_logged(commands: Commands, directory: Path) -> int:
    """Supervise commands and return the status, which goes to directory/status, too.

    What they print is shown, as long as somebody reads it, and added to directory/log.txt. They are
    told to end by the end of their input: a pipe that only this process writes to, so it ends with
    this process, however that ends. They look after what they start, and need no guard of ours.
    """
    signals = Signals()
    # Not this process, so that what they print while they end is kept if this one is killed.
    log = Reader("tee", "-aip", "--", str(directory / "log.txt"))
    status = _run(commands, signals, log, subprocess.PIPE, log.pipe)
    deadline = time.monotonic() + GRACE_SECONDS
    log.end(lambda: signals.ended and time.monotonic() > deadline)
    try:
        (directory / "status").write_text(f"{status}\n")
    except OSError as error:  # as where the disk is full
        say(f"the status, {status}, was not written: {error}")
    if status:
        say(f"ended with status {status}; the log is {directory / 'log.txt'}")
    return status
