"""What the doctor answers, as text or as JSON: findings, how bad each is, and what to set."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from megatron_burst.tools.doctor.attention import Served
from megatron_burst.tools.doctor.machine import Part, devices
from megatron_burst.tools.hardware import Devices


class Level(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"  # the command line does not run
    WRONG = "wrong"  # it runs, and its numbers are not what was meant
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, by which check, and what to set instead."""

    check: str  # the name of the check
    level: Level
    text: str
    remedy: str = ""  # the flag or variable to set


@dataclass(frozen=True, slots=True)
class Report:
    """All sections; `shape` and `kernels` are empty where no attention of ours is asked for."""

    target: str
    parts: Sequence[Part]
    hardware: Devices
    settings: Mapping[str, str]
    shape: str
    kernels: Sequence[Served]
    findings: Sequence[Finding]
    has_command: bool  # or it is asked what is here

    def verdict(self, strict: bool) -> str:
        """Return why the command line will not do, or "ok"."""
        levels = {finding.level for finding in self.findings}
        if Level.ERROR in levels:
            return "the command line will not run" if self.has_command else "no training runs here"
        if strict and Level.WRONG in levels:
            return "the command line runs, but not as it was meant"
        if self.shape and not any(kernel.is_taken for kernel in self.kernels):
            return "no attention kernel serves this shape"
        return "ok"

    def as_json(self, strict: bool) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self) | {"verdict": self.verdict(strict)}, indent=2)

    def as_text(self, strict: bool) -> str:
        """Return the sections with their headings, the verdict last."""
        sections = {
            "Installed": [f"{p.name:<22} {p.version or '-':<18} {p.use}" for p in self.parts],
            "Hardware": [*devices(self.hardware)],
            "Environment": [f"{k}={v}" for k, v in self.settings.items()] or ["nothing is set"],
            f"Kernels for {self.shape}": [_served(kernel) for kernel in self.kernels],
            f"Findings, {self.target}": [*lines_of(self.findings)],
        }
        texts = ["\n  ".join([title, *lines]) for title, lines in sections.items() if lines]
        return "\n\n".join([*texts, self.verdict(strict)])


def _served(kernel: Served) -> str:
    state = "taken" if kernel.is_taken else "no" if kernel.reasons else "could"
    return f"{kernel.kernel:<11} {state:<6} {'; '.join(kernel.reasons)}".rstrip()


def lines_of(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what is read of findings, the worst first."""
    for level in Level:
        for finding in (each for each in findings if each.level is level):
            text = finding.text.replace("\n", "\n" + " " * 11)
            remedy = f" -> {finding.remedy}" if finding.remedy else ""
            yield f"{level:<8} {finding.check}: {text}{remedy}"
