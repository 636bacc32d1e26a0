"""The page and the JSON of a check, and what to report where a stage has failed."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_burst.tools import pages
from megatron_burst.tools.gpu_check.stage import Check
from megatron_burst.tools.replacing import write_text


@dataclass(frozen=True, slots=True)
class Result:
    """What a stage has found."""

    number: int
    name: str
    about: str
    remedy: str  # what to do, and what to add to a report, where it has failed
    seconds: float
    checks: Sequence[Check]

    @property
    def faults(self) -> list[Check]:
        """The lines that failed."""
        return [check for check in self.checks if not check.passed]

    @property
    def verdict(self) -> str:
        """Whether it passed."""
        return "failed" if self.faults or not self.checks else "passed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What was checked, where, and what came of it."""

    device: str
    machine: Mapping[str, Any]  # `hardware.describe`
    results: Sequence[Result]

    @property
    def failed(self) -> list[Result]:
        """The stages that did not pass."""
        return [result for result in self.results if result.verdict == "failed"]

    def write(self, folder: Path) -> Path:
        """Write gpu-check.md and gpu-check.json; return the page."""
        write_text(folder / "gpu-check.json", json.dumps(self.as_json(), indent=2) + "\n")
        versions = (f"{name} {version}" for name, version in self.machine["versions"].items())
        text = pages.page(
            "gpu_check",
            **{name: getattr(self, name) for name in ("device", "machine", "results", "failed")},
            versions=", ".join(versions),
            command=shlex.join(self.machine["command"]),
            advice=[*self.advice(folder)],
        )
        write_text(page := folder / "gpu-check.md", text)
        return page

    def as_json(self) -> dict[str, Any]:
        """Return all that gpu-check.json holds."""
        stages = [asdict(each) | {"verdict": each.verdict} for each in self.results]
        verdict = {"device": self.device, "passed": not self.failed, "stages": stages}
        return verdict | {"machine": self.machine}

    def advice(self, folder: Path) -> Iterator[str]:
        """Yield for every failed stage what to do, and in the end what to report."""
        for result in self.failed:
            yield f"stage {result.number}, {result.name}, failed: {result.remedy}"
        if self.failed:
            names = f"{folder / 'gpu-check.md'} and {folder / 'gpu-check.json'}"
            yield f"report: an issue of this project with {names}, which name machine and versions"
