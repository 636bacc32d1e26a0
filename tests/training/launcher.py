"""Runs training jobs of `megatron_burst.pretrain_gpt` and reads what they log."""

import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_burst.tools.runlog import read_scalars
from tests.tier import is_thorough

STEPS = range(1, 21 if is_thorough() else 4)
HALF = len(STEPS) // 2
LAYERS = 4 if is_thorough() else 2

# A GPT small enough for many runs on two cores. The vocabulary is padded alike at every TP size.
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 64 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --position-embedding-type rope --attention-dropout 0
    --hidden-dropout 0 --make-vocab-size-divisible-by 256
    --tokenizer-type NullTokenizer --vocab-size 257 --null-tokenizer-eod-id 256
    --micro-batch-size 2 --global-batch-size 4 --train-iters {STEPS[-1]} --lr 1e-3
    --lr-decay-style constant --split 100,0,0 --eval-iters 0 --eval-interval 1000
    --save-interval 1000 --log-interval 1 --tensorboard-log-interval 1
""".split()
# Rings: shards as short as these go by heads, where a test does not say otherwise.
BURST = ("--context-parallel-algo", "burst", "--burst-head-parallel-size", "1")
LONGEST = 500.0  # seconds of a job, on a machine that others use, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """What a run wrote for every step, and all it printed."""

    scalars: dict[str, dict[int, float]]  # by TensorBoard's names and the step
    text: str

    @property
    def losses(self) -> dict[int, float]:
        return self.scalars["lm loss"]

    @property
    def grad_norms(self) -> dict[int, float]:
        return self.scalars["grad-norm"]


def command(ranks: int, *flags: str) -> list[str]:
    """The command line of a job under torchrun; `train` forks the same from one process."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", str(ranks), "-m", "megatron_burst.pretrain_gpt"]
    return [*torchrun, *script, *MODEL, *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_BURST_CPU": "1"}


def train(
    directory: Path,
    ranks: int,
    *flags: str,
    timeout: float = LONGEST,
    module: str = "megatron_burst.pretrain_gpt",
) -> Log:
    """Run a job to its end and return its log; AssertionError with what it printed if it fails."""
    tensorboard = directory / "tensorboard"
    flags = ("--tensorboard-dir", str(tensorboard), *flags)
    text = run_module(module, directory, ranks, *flags, timeout=timeout)
    found = {name: dict(points) for name, points in read_scalars(tensorboard).items()}
    return Log(scalars=found, text=text)


def run_module(
    module: str, directory: Path, ranks: int, *flags: str, timeout: float = LONGEST
) -> str:
    """Run `main` of a module with the small model's flags and return what all ranks printed."""
    status, text = outcome(module, directory, ranks, *flags, timeout=timeout)
    assert status == "0", f"status {status}: {' '.join(flags)}\n{text[-6000:]}"
    return text


def outcome(
    module: str, directory: Path, ranks: int, *flags: str, timeout: float = LONGEST
) -> tuple[str, str]:
    """Run it and return the first exit status that is not 0, or 0, and what all ranks printed."""
    return run_job(module, directory, ranks, (*MODEL, *flags), timeout)


def run_job(
    module: str,
    directory: Path,
    ranks: int,
    words: Sequence[str],
    timeout: float = LONGEST,
    *,
    logs_arguments: bool = False,
) -> tuple[str, str]:
    """The same with this command line alone."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "log.txt"
    job = {
        "ranks": ranks,
        "module": module,
        "flags": words,
        "log": str(log),
        "logs_arguments": logs_arguments,
    }
    return _run(job, timeout), log.read_text(errors="replace")


def rank_processes() -> list[psutil.Process]:
    """The processes of the job that runs, by rank."""
    return sorted(psutil.Process(_preloaded().pid).children(), key=lambda process: process.pid)


@functools.cache
def _preloaded() -> subprocess.Popen[str]:
    """Importing takes longer than most trainings, so one process does it for all."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.preloaded"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        process_group=0,
    )


def _run(job: dict[str, object], timeout: float) -> str:
    process = _preloaded()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    if select.select([process.stdout], [], [], timeout)[0]:
        return process.stdout.readline().strip()
    os.killpg(process.pid, signal.SIGKILL)
    _preloaded.cache_clear()
    return f"none within {timeout} s"


def allowed(after_20_steps: float) -> float:
    """What may differ after as many steps as this run takes: roundings grow with them."""
    return after_20_steps if is_thorough() else after_20_steps / 10


def table(rows: str) -> dict[str, Any]:
    """Cases, one a line: behind the name and semicolons what makes it; numbers are numbers."""
    cases = ([field.strip() for field in row.split(";")] for row in rows.splitlines())
    return {name: tuple(int(x) if x.isdigit() else x for x in case) for name, *case in cases}


def largest_difference(found: Log, expected: Log, steps: Sequence[int]) -> float:
    """The largest relative difference of loss or gradient norm over these steps."""
    return max(
        abs(a[step] - b[step]) / abs(b[step])
        for a, b in ((found.losses, expected.losses), (found.grad_norms, expected.grad_norms))
        for step in steps
    )


def report_steps(
    case: str, found: Log, expected: Log, tolerance: float = allowed(1e-4), steps: range = STEPS
) -> None:
    """Print how far losses and gradient norms of these steps differ at most, and check it."""
    report(case, largest_difference(found, expected, steps), tolerance)


def report(case: str, difference: float, tolerance: float) -> None:
    """Print a difference (seen with pytest -rP) and check it."""
    print(f"{case}: largest relative difference {difference:.1e} (allowed {tolerance:.0e})")
    assert difference < tolerance, case
