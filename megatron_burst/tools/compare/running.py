"""Runs variants one after the other; what is finished stays, so that a series can be continued."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_burst.tools.compare.results import FAILED, LEFT_OUT, Result, machine, measure
from megatron_burst.tools.compare.variants import Variant
from megatron_burst.tools.runlog import RunLogError
from megatron_burst.tools.trace import TraceError

_LOOK_SECONDS = 0.5
_LONGEST = 1000  # characters of a reason
_STEP = re.compile(r"iteration +(\d+)/ *(\d+) .*?lm loss: ([0-9.E+-]+)")
_PROFILE = tuple(
    "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4".split()
)
# What says why a run ended, the first that is there: our own refusal, an exception's last line.
_REASONS = (
    r"^(?:\[.*?\]: *)?megatron_burst: (.+)$",
    r"^(?:\[.*?\]: *)?([\w.]*(?:Error|Exception): .+)$",
)

type Report = Callable[[str], None]


class Series:
    """The runs of one comparison, each in a folder of its own.

    Args:
        directory: of the comparison.
        flags: Megatron's, the same for every variant.
        ranks: of the job.
        launcher: the command that starts that many ranks, in place of torchrun on this machine.
        peak_tflops: of a device, for the MFU.
        traced: whether our runs profile their second and third step.
    """

    def __init__(
        self,
        directory: Path,
        flags: Sequence[str],
        ranks: int,
        *,
        launcher: Sequence[str] = (),
        peak_tflops: float | None = None,
        traced: bool = True,
    ) -> None:
        self._directory, self._flags, self._launcher = directory, flags, launcher
        self._ranks, self._peak_tflops, self._traced = ranks, peak_tflops, traced

    def folder(self, variant: Variant) -> Path:
        """Return where a variant's run is."""
        return self._directory / "runs" / re.sub(r"[^a-z0-9_]+", "-", variant.name.lower())

    def command(self, variant: Variant) -> list[str]:
        """Return the command line of a variant."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher = [*torchrun, "--nproc-per-node", str(variant.ranks)]
        if self._launcher and variant.ranks == self._ranks:
            launcher = [*self._launcher]
        folder, ours = self.folder(variant), variant.flags[1] != "megatron"
        trace = _PROFILE if self._traced and ours else ()
        return [
            *launcher,
            *("-m", "megatron_burst.pretrain_gpt"),
            *self._flags,
            *variant.flags,
            *trace,
            *("--tensorboard-dir", str(folder / "tensorboard")),
            *("--log-interval", "1", "--tensorboard-log-interval", "1"),
            "--log-timers-to-tensorboard",
        ]

    def is_finished(self, variant: Variant) -> bool:
        """Whether the same command ran to its end here before, with the same versions."""
        file = self._mark(variant)
        return file.is_file() and json.loads(file.read_text()) == self._what(variant)

    def run(self, variant: Variant, report: Report) -> Result:
        """Train a variant, unless that was done; `report` gets a line on how far it is."""
        if variant.why_not:
            return Result(name=variant.name, status=LEFT_OUT, reason=variant.why_not)
        folder, command = self.folder(variant), self.command(variant)
        failed = Result(name=variant.name, status=FAILED, command=command, ranks=variant.ranks)
        if not self.is_finished(variant):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was not finished
            folder.mkdir(parents=True)
            if status := _train(command, folder / "log.txt", report):
                return replace(failed, reason=_reason(status, folder / "log.txt"))
            self._mark(variant).write_text(json.dumps(self._what(variant), indent=2) + "\n")
        try:
            return measure(variant.name, command, variant.ranks, folder, self._peak_tflops)
        except (RunLogError, TraceError) as error:
            return replace(failed, reason=str(error))

    def _mark(self, variant: Variant) -> Path:
        return self.folder(variant) / "finished.json"

    def _what(self, variant: Variant) -> dict[str, object]:
        return {"machine": machine(), "command": self.command(variant)}


def _train(command: Sequence[str], log: Path, report: Report) -> int:
    environment = {
        **os.environ,
        # Megatron asks for it before it runs context parallelism on GPUs older than Blackwell.
        "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore::UserWarning"),
    }
    before = signal.signal(signal.SIGTERM, _interrupt)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        try:
            while process.poll() is None:
                report(_progress(log))
                time.sleep(_LOOK_SECONDS)
        finally:
            signal.signal(signal.SIGTERM, before)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    return process.returncode


def _interrupt(*_: object) -> None:
    """A batch system's SIGTERM is an interruption like Ctrl-C: the training must not outlive us."""
    raise KeyboardInterrupt


def _progress(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20000))
        steps = _STEP.findall(file.read().decode(errors="replace"))
    if not steps:
        return "starting"
    step, last, loss = steps[-1]
    return f"step {step}/{last}, loss {float(loss):.3f}"


def _reason(status: int, log: Path) -> str:
    """Return why a run ended, by its log."""
    lines = log.read_text(errors="replace").splitlines()
    for pattern in _REASONS:
        for number, line in enumerate(lines):
            if found := re.match(pattern, line):
                more = itertools.takewhile(lambda text: text[:1] == " ", lines[number + 1 :])
                return " ".join([found[1], *(text.strip() for text in more)])[:_LONGEST]
    return f"status {status}; see {log}"
