"""Runs variants one after the other; what is finished stays, so that a series can be continued."""

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from megatron_burst.plugin.limits import MEGATRON
from megatron_burst.tools import replacing
from megatron_burst.tools.compare.results import FAILED, Result, machine, measure
from megatron_burst.tools.compare.variants import Variant
from megatron_burst.tools.flags import without
from megatron_burst.tools.launch import site
from megatron_burst.tools.launch.processes import Signals, supervise

_MARK = "finished.json"
_LONGEST = 1000  # characters of a reason
_STEP = re.compile(r"iteration +(\d+)/ *(\d+) \|")  # of Megatron's log
_TAIL = 2**16  # bytes of a log, in which there is a line of the last step
_TRACE = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4".split()
_LOG = "--log-interval 1 --tensorboard-log-interval 1 --log-timers-to-tensorboard".split()
# What says why a run ended, the first that is there: our own refusal, an exception's last line.
_REASONS = (
    r"^(?:\[.*?\]: *)?megatron_burst: (.+)$",
    r"^(?:\[.*?\]: *)?([\w.]*(?:Error|Exception): .+)$",
)
_QUIET = {"PYTHONWARNINGS": "ignore::UserWarning"}


@dataclass(frozen=True, slots=True)
class Watched:
    """What is shown while a training runs, read from its log whenever it is drawn."""

    name: str
    log: Path

    def __rich__(self) -> str:
        """Say how far it has come, and where it can be watched."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            if steps := _STEP.findall(file.read().decode(errors="replace")):
                return f"{self.name}: step {steps[-1][0]} of {steps[-1][1]}, log: {self.log}"
        return f"{self.name}, to be watched in {self.log}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """The runs of one comparison, each in a folder of its own."""

    directory: Path
    flags: Sequence[str]  # Megatron's, the same for every variant
    ranks: int  # of the job
    launcher: Sequence[str] = ()  # what starts that many, in place of torchrun on this machine
    peak_tflops: float | None = None  # of a device, for the MFU
    traced: bool = True  # whether our runs profile their second and third step

    def folder(self, variant: Variant) -> Path:
        """Return where a variant's run is."""
        return self.directory / "runs" / re.sub(r"[^a-z0-9_]+", "-", variant.name.lower())

    def starts_here(self, variant: Variant) -> bool:
        """Whether its ranks are processes of this machine."""
        return not self.launcher or variant.ranks != self.ranks

    def command(self, variant: Variant) -> list[str]:
        """Return the command line of a variant."""
        launcher = [*self.launcher]
        if self.starts_here(variant):
            launcher = [sys.executable, "-m", "torch.distributed.run", *site.ONE_MACHINE]
            launcher += ["--nproc-per-node", str(variant.ranks)]
        return [
            *launcher,
            *("-m", "megatron_burst.pretrain"),
            *without(self.flags, variant.dropped),
            *variant.flags,
            *(_TRACE if self.traced and variant.algorithm != MEGATRON else ()),
            *("--tensorboard-dir", str(self.folder(variant) / "tensorboard")),
            *_LOG,
        ]

    def is_finished(self, variant: Variant) -> bool:
        """Whether the same command ran to its end here before, with the same code and settings."""
        file = self.folder(variant) / _MARK
        try:
            return file.is_file() and json.loads(file.read_text()) == self._what(variant)
        except ValueError:  # its writing was ended
            return False

    def run(self, variant: Variant, signals: Signals) -> Result:
        """Train a variant, unless that was done; KeyboardInterrupt where we are told to end."""
        folder, command = self.folder(variant), self.command(variant)
        failed = Result(name=variant.name, status=FAILED, command=command, ranks=variant.ranks)
        if not self.is_finished(variant):
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was not finished
            folder.mkdir(parents=True)
            if status := _train(command, folder / "log.txt", signals):
                return replace(failed, reason=_reason(status, folder / "log.txt"))
            replacing.write_text(folder / _MARK, json.dumps(self._what(variant), indent=2) + "\n")
        try:
            return measure(variant.name, folder, self.peak_tflops, command)
        except ValueError as error:
            return replace(failed, reason=str(error))

    def _what(self, variant: Variant) -> dict[str, object]:
        return {"machine": machine(), "code": _code(), "command": self.command(variant)}


@cache
def _code() -> str:
    """Return a digest of this package, whose version says nothing of a commit."""
    package = Path(__file__).parents[2]
    files = (file.read_bytes() for file in sorted(package.rglob("*.py")))
    return sha256(b"".join(files)).hexdigest()


def _train(command: Sequence[str], log: Path, signals: Signals) -> int:
    environment = site.defaults(command) | _QUIET | os.environ
    with log.open("wb") as file:
        output = file.fileno()
        status = supervise([("", command)], signals, output=output, environment=environment)
    if signals.ended:  # a batch system's SIGTERM is an interruption like Ctrl-C
        raise KeyboardInterrupt
    return status


def _reason(status: int, log: Path) -> str:
    """Return why a run ended, by its log."""
    lines = log.read_text(errors="replace").splitlines()
    for pattern in _REASONS:
        for number, line in enumerate(lines):
            if match := re.match(pattern, line):
                more = itertools.takewhile(lambda text: text[:1] == " ", lines[number + 1 :])
                return " ".join([match[1], *(text.strip() for text in more)])[:_LONGEST]
    return f"status {status}; see {log}"
