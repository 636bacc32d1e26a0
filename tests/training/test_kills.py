"""Ranks that are killed, stopped or signalled, at moments drawn at random. (slow)

The seed of a series is printed with every kill: BURST_FAULT_SEED repeats it.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.training.faults import (
    MODULE,
    TorchrunJob,
    Training,
    check_same_state,
    check_same_steps,
    recorded,
    steps,
)
from tests.training.launcher import BURST, run_module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # mostly imports, on a busy machine

SEED = int(os.environ.get("BURST_FAULT_SEED", "7"))
TWO = (*BURST, "--context-parallel-size", "2", "--hybrid-layer-pattern", "*-*-")
STEPS, INTERVAL = 25, 3
KILLS = 5  # of each of four trainings
CASES = {
    "torch_dist": ("--ckpt-format", "torch_dist"),
    "torch": ("--ckpt-format", "torch"),
    "distributed optimizer": ("--use-distributed-optimizer",),
    "recompute": tuple(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
        "--recompute-attention-fraction 0.5 --burst-layout segmented-zigzag".split()
    ),
}


class Moment:
    """When and whom a kill hits: at the start, in a step or while a checkpoint is written."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.kind = chance.choice(("start", "step", "step", "save", "save"))
        part = STEPS // KILLS  # each kill has its part of the training
        self.step = chance.randint(number * part + 1, (number + 1) * part - 1)
        if self.kind == "save":
            self.step = -(-self.step // INTERVAL) * INTERVAL
        self.delay = chance.uniform(0, {"start": 1.0, "step": 0.3, "save": 0.3}[self.kind])
        self.victim = chance.randrange(2)

    def has_come(self, training: Training) -> bool:
        if self.kind == "save":
            return f"saving checkpoint at iteration {self.step:7d}" in training.text
        return self.kind == "start" or training.reaches(self.step)

    def __str__(self) -> str:
        return f"rank {self.victim}, {self.delay:.2f} s into {self.kind} {self.step}"


def later_folders(checkpoint: Path) -> list[str]:
    """Of checkpoints that a kill has truncated."""
    names = (path.name for path in checkpoint.glob("iter_*") if path.is_dir())
    return sorted(name for name in names if int(name[5:]) > recorded(checkpoint))


@pytest.mark.parametrize("case", CASES)
def test_a_killed_training_ends_as_if_nothing_had_happened(
    case: str, tmp_path: Path, data: tuple[str, ...]
) -> None:
    flags = (*data, *TWO, *CASES[case], "--train-iters", str(STEPS))
    flags = (*flags, "--save-interval", str(INTERVAL))
    expected, checkpoint = tmp_path / "expected", tmp_path / "checkpoint"
    whole = run_module(MODULE, tmp_path / "whole", 2, *flags, "--save", str(expected))
    flags = (*flags, "--save", str(checkpoint), "--load", str(checkpoint))
    chance = random.Random(f"{SEED} {case}")
    for number in range(KILLS):
        moment, start = Moment(chance, number), recorded(checkpoint)
        training = Training(tmp_path / f"launch{number}", 2, *flags)
        processes = training.processes()
        assert training.wait_until(lambda: moment.has_come(training)), training.text[-3000:]  # noqa: B023
        time.sleep(moment.delay)
        family = [p for rank in processes for p in (rank, *rank.children(recursive=True))]
        processes[moment.victim].kill()
        status, text = training.end()
        assert status != 0
        assert not psutil.wait_procs(family, timeout=10)[1]
        done = check_same_steps(text, whole)
        assert not done or done[0] == start + 1
        print(
            f"{case}, seed {SEED}, kill {number + 1}: {moment}: did {len(done)} steps after {start}"
            f"; recorded {recorded(checkpoint)}, cut: {later_folders(checkpoint) or 'nothing'}"
        )
    start = recorded(checkpoint)
    text = run_module(MODULE, tmp_path / "last", 2, *flags)
    assert check_same_steps(text, whole) == list(range(start + 1, STEPS + 1))
    folder = f"iter_{STEPS:07d}"
    tensors = check_same_state(checkpoint / folder, expected / folder)
    print(f"{case}: {tensors} tensors of the last checkpoint have the same bits")


def test_torchrun_restarts_a_job_whose_ranks_are_killed(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    flags = (*data, *TWO, "--train-iters", "40", "--save-interval", "3")
    expected, checkpoint = tmp_path / "expected", tmp_path / "checkpoint"
    whole = run_module(MODULE, tmp_path / "whole", 2, *flags, "--save", str(expected))
    flags = (*flags, "--save", str(checkpoint), "--load", str(checkpoint))
    with TorchrunJob(tmp_path, *flags, restarts=2) as job:
        family: list[psutil.Process] = []
        for rank, step in ((1, 5), (0, 15)):
            job.wait_for(f"iteration {step:8d}/")
            job.ranks()[rank].kill()
            family += job.process.children(recursive=True)
        assert job.end() == 0, job.text[-3000:]
    assert not psutil.wait_procs(family, timeout=10)[1]
    last = job.text[job.text.rindex("successfully loaded checkpoint from") :]
    assert job.text.count("megatron-core 0.") == 3, "starts"
    done = check_same_steps(last, whole)
    assert done == list(range(done[0], 41)) and done[0] > 15 - 3
    check_same_state(checkpoint / "iter_0000040", expected / "iter_0000040")


@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_to_torchrun(tmp_path: Path, data: tuple[str, ...], handled: bool) -> None:
    checkpoint = tmp_path / "checkpoint"
    flags = (*data, *TWO, "--train-iters", "100000", "--save", str(checkpoint))
    flags = (*flags, *(["--exit-signal-handler"] if handled else []))
    with TorchrunJob(tmp_path, *flags) as job:
        job.wait_for(f"iteration {3:8d}/")
        job.process.terminate()
        started = time.monotonic()
        assert job.end(seconds=60) != 0  # of torchrun itself
        seconds = time.monotonic() - started
    assert seconds < 30, "torchrun had to kill"
    assert "Received 15 death signal" in job.text or "SignalException" in job.text
    assert bool(recorded(checkpoint)) == handled
    if handled:
        assert recorded(checkpoint) == max(steps(job.text))
    assert "megatron_burst: rank" not in job.text


def test_a_stopped_rank_ends_the_job_with_its_name(tmp_path: Path, data: tuple[str, ...]) -> None:
    """Of a step of 64 micro-batches nearly all is attention, so that is what waits."""
    flags = (*data, *TWO, "--global-batch-size", "128", "--train-iters", "100000")
    with TorchrunJob(tmp_path, *flags, "--distributed-timeout-minutes", "1") as job:
        job.wait_for(f"iteration {1:8d}/")
        time.sleep(1)
        job.ranks()[1].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert job.end(seconds=150) != 0
        seconds = time.monotonic() - started
    print(f"the job ended {seconds:.0f} s after a rank was stopped")
    (report,) = re.findall(r"megatron_burst: rank 0 failed: .*", job.text)
    print(report)
    named = r"rank 0, (forward|backward) step \d: could not (receive|send) [\w ]+ of CP rank \d "
    assert re.search(named + "(from|to) rank 1", report)
    assert 55 < seconds < 60 + 30 + 20  # the limit, then torchrun waits 30 s before it kills


def test_a_missing_data_set_is_said_once(tmp_path: Path) -> None:
    with TorchrunJob(tmp_path, *TWO, "--data-path", str(tmp_path / "nothing")) as job:
        assert job.end() != 0
    assert len(re.findall(r"burst: rank \d failed: the data set cannot be read", job.text)) == 1
    assert job.text.count("Traceback") == 1  # torchrun's own
