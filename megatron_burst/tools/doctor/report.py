"""The doctor's sections as text or as JSON."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_burst.tools.doctor.attention import Served
from megatron_burst.tools.doctor.machine import Part, devices
from megatron_burst.tools.doctor.situation import Finding, Level
from megatron_burst.tools.hardware import Hardware


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All sections; `kernels` and `findings` of the command are empty where none was given."""

    target: str
    parts: Sequence[Part]
    hardware: Hardware
    settings: Mapping[str, str]
    shape: str
    kernels: Sequence[Served]
    findings: Sequence[Finding]
    has_command: bool

    def verdict(self, strict: bool) -> str:
        """Return why the command line will not do, or "" where it will."""
        levels = {finding.level for finding in self.findings}
        if Level.ERROR in levels:
            return "the command line will not run"
        if strict and Level.WRONG in levels:
            return "the command line runs, but not as it was meant"
        if self.shape and not any(kernel.is_taken for kernel in self.kernels):
            return "no attention kernel serves this shape"
        return ""


def as_json(report: Report, strict: bool) -> str:
    """Return one JSON object."""
    content: dict[str, Any] = dataclasses.asdict(report)
    return json.dumps(content | {"verdict": report.verdict(strict) or "ok"}, indent=2)


def as_text(report: Report, strict: bool) -> str:
    """Return the sections with their headings, the verdict last."""
    parts = [f"{part.name:<22} {part.version or '-':<18} {part.use}" for part in report.parts]
    sections = {
        "Installed": parts,
        "Hardware": list(devices(report.hardware)),
        "Environment": [f"{k}={v}" for k, v in report.settings.items()] or ["nothing is set"],
        f"Kernels for {report.shape}": [_served(kernel) for kernel in report.kernels],
        f"Findings, {report.target}": _findings(report.findings),
    }
    texts = ["\n  ".join([title, *lines]) for title, lines in sections.items() if lines]
    verdict = report.verdict(strict)
    if report.has_command:
        verdict = verdict or "the command line will run"
    return "\n\n".join(filter(None, [*texts, verdict]))


def _served(kernel: Served) -> str:
    state = "taken" if kernel.is_taken else "no" if kernel.reasons else "could"
    return f"{kernel.kernel:<11} {state:<6} {'; '.join(kernel.reasons)}".rstrip()


def _findings(findings: Iterable[Finding]) -> list[str]:
    lines = []
    for finding in sorted(findings, key=lambda finding: list(Level).index(finding.level)):
        text = finding.text.replace("\n", "\n" + " " * 11)
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.level:<8} {finding.check}: {text}{remedy}")
    return lines
