"""The report of a comparison: one table, in the terminal and on a page, and one JSON."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_burst.tools.compare import tiles
from megatron_burst.tools.compare.picture import draw
from megatron_burst.tools.compare.results import (
    FAILED,
    FIGURES,
    RAN,
    Difference,
    Result,
    differences,
    shown,
)
from megatron_burst.tools.compare.switching import HEAD, switching
from megatron_burst.tools.compare.variants import REFERENCES
from megatron_burst.tools.replacing import write_text

COLUMNS = ("loss apart", "last loss", "q1 to q3 ms", *FIGURES)
_STEPS_TO_LEARN, _NATS = 20, 0.5  # by how much a toy's loss falls at least in so many steps
_WORDS = """
* **loss apart**: |loss - reference| / reference, the largest over the first steps, which alone are
  judged: training amplifies the last bit of a float. `tensorboard --logdir runs` shows all steps.
* **step**: the median time of a step, the first five left out where there are ten; **q1 to q3**:
  what half of them lie between.
* **MFU**: model FLOPs of a step (attention's causal half counted as a half, nothing counted twice
  that is recomputed) over time x GPUs x peak; n/a where the peak is not known (`--peak-tflops`), or
  with experts, MLA, MTP, windows, packed sequences and block masks.
* **memory**: the peak of the fullest rank: of tensors on the GPU; without a GPU of a whole process.
* **sent**: payload bytes that attention sends, of a rank and step; Megatron's own paths count none.
* **max/mean**: attention FLOPs of the busiest rank over the mean, of micro-batches in the mean.
* **exposed**: communication that nothing is computed beside, of a rank and step, and its share of
  the time of attention; **hidden** is the rest, as a share of communication.
"""
_TILES = """
## One rank's share of {} on this device

Causal attention in bfloat16. A rank in the middle of a ring runs its own plans, kernels, merges and
sums, without messages. Beside it one call of the same kernel, and of TransformerEngine where it is
installed, on so many tokens that the FLOPs are about the same. Rings lose on one GPU what their
speed is below 1; what messages cost more needs several.
"""


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
    shares: Sequence[tiles.Row] = ()  # one rank's share of a ring on this device, if timed

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
        found = [f"{r.name} failed: {r.reason}" for r in self.results if r.status == FAILED]
        for each in self.ran if self.is_toy else ():
            first, last = each.losses[0][1], each.losses[-1][1]
            if each.steps >= _STEPS_TO_LEARN and not first - last >= _NATS:
                text = f"{each.name} has not learned: its loss is {last:.3f} after {each.steps} "
                found.append(f"{text}steps, {first:.3f} at first (at least {_NATS} nats lower)")
        return found + [
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
        return [
            f"all losses of the first {self.judged_steps} steps agree with those of "
            f"{self.reference} within {worst:.1e} (allowed: {self.tolerance:.0e})"
        ]


def rows(comparison: Comparison) -> list[list[str]]:
    """Return the name and the cells of every variant that ran."""
    return [list(_cells(result, comparison.apart)) for result in comparison.ran]


def write_report(comparison: Comparison, directory: Path) -> Path:
    """Write compare.md, its picture and compare.json; return the page."""
    page = directory / "compare.md"
    write_text(page, _page(comparison, draw(comparison.ran, comparison.reference, directory)))
    write_text(directory / "compare.json", json.dumps(as_json(comparison), indent=2) + "\n")
    return page


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all that compare.json holds."""
    apart = {name: asdict(difference) for name, difference in comparison.apart.items()}
    judged = {"reference": comparison.reference, "apart": apart, "faults": comparison.faults}
    return asdict(comparison) | judged


def _page(comparison: Comparison, picture: str) -> str:
    others = [result for result in comparison.results if result.status != RAN]
    count = f"{len(comparison.ran)} of {len(comparison.results)} variants"
    parts = [
        f"# Context parallelism compared: {count}",
        "\n".join(f"**{text}.**  " for text in comparison.verdict),
        _table(["", *COLUMNS], rows(comparison)),
        *([picture] if picture else []),
        _WORDS.strip(),
        "## From Megatron's own context parallelism to burst",
    ]
    words, lines = switching(comparison.ran)
    parts += [words, _table(HEAD, lines)] if lines else [words]
    if others:
        why = _table(["not run", "", "why"], [[r.name, r.status, r.reason] for r in others])
        parts += ["## Not in the figures", why]
    if comparison.shares:
        table = _table(["", *tiles.COLUMNS], tiles.cells(comparison.shares))
        parts += [_TILES.strip().format(tiles.RANKS), table]
    made = f"```bash\n{comparison.command}\n```\n\nEvery variant's command is in compare.json."
    if (documents := max((r.documents or 0 for r in comparison.ran), default=0)) > 1:
        made += f" A micro-batch has {documents:.1f} documents in the mean."
    parts += ["## How it was made", made, _table(["", ""], comparison.machine.items())]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _cells(result: Result, apart: Mapping[str, Difference]) -> Iterable[str]:
    yield result.name
    yield f"{apart[result.name].relative:.1e}" if result.name in apart else "reference"
    yield f"{result.losses[-1][1]:.4f}"
    yield " to ".join(f"{1e3 * x:,.0f}" for x in result.quartiles) if result.quartiles else "n/a"
    figures = asdict(result) | {"exposed": None, "share": None, "hidden": None}
    figures |= result.exposed or {}
    yield from (shown(name, figures[field]) for name, (field, *_) in FIGURES.items())
