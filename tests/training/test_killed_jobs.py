"""Jobs of the launchers, any process of which gets any signal at any moment. (slow)

BURST_FAULT_STARTS says how many starts, BURST_FAULT_SEED repeats a series.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.scripts.stand_ins import SSH
from tests.training.faults import LONGEST, check_same_state, check_same_steps, recorded, steps
from tests.training.launcher import BURST, MODEL, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

SEED = os.environ.get("BURST_FAULT_SEED", "7")
STARTS = int(os.environ.get("BURST_FAULT_STARTS", "3"))
STEPS, INTERVAL = 40, 3
SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in "TERM INT HUP QUIT KILL".split())
PARTS = {
    "launcher": r"tools\.launch (local|ssh)",
    "node": r"tools\.launch node",
    "torchrun": r"torch\.distributed\.run",
    "rank": r"^\S*python\S* -u -m megatron_burst\.pretrain",
    "tee": "^tee ",
    "guard": r"guard\.py",
}
WITHOUT = ("tee", "guard")  # the job goes on
LOCAL = ("local", "--ranks-per-node", "2")
OVER_SSH = ("ssh", "--nodes", "n1 n2", "--ranks-per-node", "1")


class Job:
    """One start of a job, in a folder that all starts share."""

    def __init__(self, folder: Path, number: int, place: tuple[str, ...], *flags: str) -> None:
        self._mark, self.folder = f"{folder}/{number}", folder
        ssh = folder / "ssh"
        ssh.write_text(f"#!/usr/bin/env bash\n{SSH}")
        ssh.chmod(0o755)
        more = {"STAND_INS": self._mark, "BURST_SSH": str(ssh), "BURST_MASTER": "127.0.0.1"}
        words = [*place, "--output", str(folder / "out"), "--", *MODEL, *flags]
        self._log = folder / "out/log.txt"
        self._before = self._log.stat().st_size if self._log.exists() else 0
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_burst.tools.launch", *words],
            env=environment() | more,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def text(self) -> str:
        """What this start has logged."""
        text = self._log.read_bytes()[self._before :] if self._log.exists() else b""
        return text.decode(errors="replace")

    def processes(self, part: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                if (
                    process.environ().get("STAND_INS") == self._mark
                    and process.status() != "zombie"
                ):
                    found += [process] if re.search(PARTS.get(part, ""), line) else []
            except psutil.Error:  # it has ended, or is somebody else's
                continue
        return found

    def wait_for(self, condition: Callable[[], object], seconds: float = LONGEST) -> bool:
        """Wait for it; False if the job ended before."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"it did not come so far\n{self.text[-3000:]}"
            time.sleep(0.01)
        return True

    def seconds_until_gone(self) -> float:
        """Wait for the launcher, then ten seconds; return how long it took until none was left."""
        started = time.monotonic()
        self.process.wait(LONGEST)
        deadline = time.monotonic() + 10
        while left := self.processes():
            assert time.monotonic() < deadline, [p.cmdline() for p in left]
            time.sleep(0.1)
        return time.monotonic() - started


class Kill:
    """Whom a kill hits, with what, and when: while a start begins or behind its first steps."""

    def __init__(self, chance: random.Random) -> None:
        self.part, self.number = chance.choice([*PARTS]), chance.choice(SIGNALS)
        self.early = chance.random() < 0.4
        self.delay = chance.uniform(0, 8.0 if self.early else 1.5)
        self.which = chance.random()

    def hit(self, job: Job) -> bool:
        """Send the signal; False if there was no such process any more."""
        if not self.early and not job.wait_for(lambda: steps(job.text)):
            return False
        time.sleep(self.delay)
        # Of an early one there may be none yet.
        job.wait_for(lambda: job.processes(self.part))
        if not (found := job.processes(self.part)):
            return False
        try:
            found[int(self.which * len(found))].send_signal(self.number)
        except psutil.NoSuchProcess:
            return False
        return True

    def __str__(self) -> str:
        when = f"{self.delay:.1f} s behind its {'start' if self.early else 'first step'}"
        return f"{signal.Signals(self.number).name} to {self.part} {when}"


def check_start(text: str, expected: str, begin: int) -> list[int]:
    """Its steps are those of the whole training, from the newest checkpoint on."""
    done = check_same_steps(text, expected)
    assert not done or done[0] == begin + 1, text[-3000:]
    assert not begin or not done or "successfully loaded checkpoint" in text
    return done


@pytest.mark.parametrize("place", [LOCAL, OVER_SSH], ids=["local", "ssh"])
def test_no_process_and_no_checkpoint_is_lost(
    place: tuple[str, ...], tmp_path: Path, data: tuple[str, ...]
) -> None:
    flags = (*data, *BURST, "--context-parallel-size", "2", "--hybrid-layer-pattern", "*-*-")
    flags = (*flags, "--train-iters", str(STEPS), "--save-interval", str(INTERVAL))
    whole = Job(made(tmp_path, "whole"), 0, place, *flags, "--save", f"{tmp_path}/expected")
    assert whole.process.wait(LONGEST) == 0, whole.text[-3000:]
    chance, checkpoint = random.Random(f"{SEED} {place[0]}"), tmp_path / "checkpoint"
    folder = made(tmp_path, "killed")
    flags = (*flags, "--save", str(checkpoint), "--load", str(checkpoint))
    saved = 0
    for number in range(STARTS):
        saved = begin = recorded_since(saved, checkpoint)
        kill, job = Kill(chance), Job(folder, number, place, *flags)
        hit = kill.hit(job)
        text = (
            f"{place[0]}, seed {SEED}, start {number + 1}: {kill}{'' if hit else ' (it was over)'}"
        )
        while kill.part in WITHOUT:  # it goes on, to the next kill
            kill = Kill(chance)
            if kill.part not in WITHOUT:
                text += f", then {kill}{'' if kill.hit(job) else ' (it was over)'}"
        seconds = job.seconds_until_gone()
        done = check_start(job.text, whole.text, begin)
        print(
            f"{text}: {len(done)} steps from {begin}, status {job.process.returncode}; "
            f"none left after {seconds:.1f} s",
            flush=True,
        )
        if recorded(checkpoint) == STEPS:  # once more, from the beginning
            check_same_state(
                checkpoint / f"iter_{STEPS:07d}", tmp_path / f"expected/iter_{STEPS:07d}"
            )
            checkpoint.rename(tmp_path / f"done{number}")
            saved = 0
    begin = recorded_since(saved, checkpoint)
    job = Job(folder, STARTS, place, *flags)
    assert job.process.wait(LONGEST) == 0, job.text[-3000:]
    assert check_start(job.text, whole.text, begin) == list(range(begin + 1, STEPS + 1))
    last = f"iter_{STEPS:07d}"
    tensors = check_same_state(checkpoint / last, tmp_path / "expected" / last)
    print(f"{place[0]}: {tensors} tensors of the last checkpoint have the same bits")


def recorded_since(saved: int, checkpoint: Path) -> int:
    """The newest checkpoint, which is not older than what was there before."""
    now = recorded(checkpoint)
    assert now >= saved, "a checkpoint is lost"
    return now


def made(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
