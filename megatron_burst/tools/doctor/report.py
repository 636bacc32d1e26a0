"""The doctor's sections as text or as JSON."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_burst.tools.doctor.check import Finding, Level, worst
from megatron_burst.tools.doctor.kernels import Served
from megatron_burst.tools.doctor.machine import Part, devices
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
        level = worst(self.findings)
        if level is Level.ERROR:
            return "the command line will not run"
        if strict and level is Level.WRONG:
            return "the command line runs, but not as it was meant"
        if self.shape and not any(kernel.is_taken for kernel in self.kernels):
            return "no attention kernel serves this shape"
        return ""


def as_json(report: Report, strict: bool) -> str:
    """Return one JSON object."""
    content: dict[str, Any] = dataclasses.asdict(report)
    content["verdict"] = report.verdict(strict) or "ok"
    return json.dumps(content, indent=2)


def as_text(report: Report, strict: bool) -> str:
    """Return the sections with their headings, the verdict last."""
    sections = [
        ("Installed", [_part(part) for part in report.parts]),
        ("Hardware", list(devices(report.hardware))),
        ("Environment", [f"{k}={v}" for k, v in report.settings.items()] or ["nothing is set"]),
        (f"Kernels for {report.shape}", [_served(kernel) for kernel in report.kernels]),
        (f"Findings, {report.target}", _findings(report.findings)),
    ]
    text = "\n\n".join(
        "\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines
    )
    if not report.has_command and not report.shape:
        return text
    verdict = report.verdict(strict)
    return f"{text}\n\n{verdict or 'the command line will run' if report.has_command else verdict}"


def _part(part: Part) -> str:
    return f"{part.name:<22} {part.version or '-':<18} {part.use}".rstrip()


def _served(kernel: Served) -> str:
    state = "taken" if kernel.is_taken else "no" if kernel.reasons else "could"
    return f"{kernel.kernel:<11} {state:<6} {'; '.join(kernel.reasons)}".rstrip()


def _findings(findings: Iterable[Finding]) -> list[str]:
    ordered = sorted(findings, key=lambda finding: list(Level).index(finding.level))
    lines = []
    for finding in ordered:
        first, *more = finding.text.splitlines()
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        lines.append(f"{finding.level:<8} {finding.check}: {first}{'' if more else remedy}")
        lines += [f"         {line.strip()}" for line in more]
        lines += [f"        {remedy}"] if more and remedy else []
    return lines
