"""The report of a comparison: one table, in the terminal and on a page, and one JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any

from megatron_burst.tools import pages, terminal
from megatron_burst.tools.compare.results import (
    FAILED,
    FIGURES,
    RAN,
    Difference,
    Result,
    differences,
)
from megatron_burst.tools.compare.variants import REFERENCES
from megatron_burst.tools.replacing import write_text

_COLUMNS = ("loss apart", "loss", "q1 to q3 ms", *FIGURES)
_STEPS_TO_LEARN, _NATS = 20, 0.5  # by how much a toy's loss falls at least in so many steps


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was compared, and how it is judged."""

    command: str
    flags: Sequence[str]
    machine: Mapping[str, str]
    results: Sequence[Result]
    judged_steps: int
    tolerance: float
    is_toy: bool = False  # which has to learn: another training may go on from a checkpoint

    @property
    def ran(self) -> list[Result]:
        """The results of what ran."""
        return [result for result in self.results if result.status == RAN]

    @property
    def reference(self) -> str:
        """What the losses of all are held against; empty where nothing ran."""
        names = [result.name for result in self.ran]
        return next((name for name in (*REFERENCES, *names) if name in names), "")

    @property
    def apart(self) -> dict[str, Difference]:
        """How far the others are from it in the steps that are judged."""
        return differences(self.results, self.reference, self.judged_steps) if self.ran else {}

    @property
    def faults(self) -> list[str]:
        """What is wrong, a sentence each."""
        faults = [f"{r.name} failed: {r.reason}" for r in self.results if r.status == FAILED]
        for each in self.ran if self.is_toy else ():
            first, last = each.losses[0][1], each.losses[-1][1]
            if each.steps >= _STEPS_TO_LEARN and not first - last >= _NATS:
                text = f"{each.name} has not learned: its loss is {last:.3f} after {each.steps} "
                faults.append(f"{text}steps, {first:.3f} at first (at least {_NATS} nats lower)")
        return faults + [
            f"{name} differs from {self.reference} by {far.relative:.1e} at step {far.step} "
            f"(allowed: {self.tolerance:.0e})"
            for name, far in self.apart.items()
            if not far.relative <= self.tolerance
        ]

    @property
    def verdict(self) -> list[str]:
        """The faults, or one sentence that says how near all are."""
        if self.faults or not self.apart:
            return self.faults or ["there was nothing to compare"]
        worst = max(difference.relative for difference in self.apart.values())
        steps = min(self.judged_steps, *(result.steps for result in self.ran))
        return [
            f"all losses of the first {steps} steps agree with those of {self.reference} within "
            f"{worst:.1e} (allowed: {self.tolerance:.0e})"
        ]


def write_report(comparison: Comparison, directory: Path) -> Path:
    """Write compare.md and compare.json; return the page."""
    page = directory / "compare.md"
    columns, rows = table(comparison)
    write_text(
        page, pages.page("compare", comparison=comparison, columns=["", *columns], rows=rows)
    )
    write_text(directory / "compare.json", json.dumps(as_json(comparison), indent=2) + "\n")
    return page


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all that compare.json holds."""
    apart = {name: asdict(difference) for name, difference in comparison.apart.items()}
    judged = {"reference": comparison.reference, "apart": apart, "faults": comparison.faults}
    return asdict(comparison) | judged


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the columns in which a variant that ran has a figure, and its name and cells there."""
    apart = comparison.apart
    every = [[*_cells(result, apart.get(result.name))] for result in comparison.ran]
    shown = [any(row[n] != terminal.NONE for row in every) for n in range(len(_COLUMNS))]
    rows = [[r.name, *compress(c, shown)] for r, c in zip(comparison.ran, every, strict=True)]
    return [*compress(_COLUMNS, shown)], rows


def _cells(result: Result, apart: Difference | None) -> Iterator[str]:
    yield f"{apart.relative:.1e}" if apart else "reference"
    yield f"{result.losses[-1][1]:.4f}"
    yield " to ".join(f"{1e3 * x:,.0f}" for x in result.quartiles or ()) or terminal.NONE
    yield from terminal.cells(asdict(result) | {**(result.exposed or {})}, FIGURES)
