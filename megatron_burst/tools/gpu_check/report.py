"""The page and the JSON of a check, and what to report where a stage has failed."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
        write_text(page := folder / "gpu-check.md", "\n\n".join(self._page(folder)) + "\n")
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

    def _page(self, folder: Path) -> Iterator[str]:
        passed = len(self.results) - len(self.failed)
        yield f"# GPU check: {passed} of {len(self.results)} stages passed"
        versions = ", ".join(f"{k} {v}" for k, v in self.machine["versions"].items())
        yield f"{self.machine['time']}, {self.device}; {versions}. Command:"
        yield f"```bash\n{shlex.join(self.machine['command'])}\n```"
        if self.failed:
            yield "\n".join(f"* {line}" for line in self.advice(folder))
        for result in self.results:
            title = f"## {result.number}. {result.name}: {result.verdict}"
            yield f"{title}\n\n{result.about} {result.seconds:.0f} s."
            rows = ("| what | found | allowed | |", "|---|---|---|---|", *map(_row, result.checks))
            yield "\n".join(rows)


def _row(check: Check) -> str:
    state = "" if not check.allowed and check.passed else "ok" if check.passed else "**failed**"
    cells = (check.name, check.found, check.allowed, state)
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
