"""The report of a comparison: one table, in the terminal and on a page with a picture, one JSON."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_burst.tools.compare.results import RAN, Difference, Result

COLUMNS = (
    "loss apart",
    "last loss",
    "step ms",
    "tokens/s a rank",
    "MFU %",
    "memory GiB",
    "sent MiB",
    "exposed ms",
    "exposed %",
    "hidden %",
)
_WORDS = """
* **loss apart**: |loss - reference| / reference, the largest over the first steps, which alone are
  judged: training amplifies the last bit of a float.
* **step**: the median time of a step, the first five left out where there are ten.
* **MFU**: model FLOPs of a step (attention's causal half counted as a half, nothing counted twice
  that is recomputed) over time x GPUs x peak.
* **memory**: the peak of the fullest rank: of tensors on the GPU; without a GPU of a whole process.
* **sent**: payload bytes that attention sends, of a rank and step; Megatron's own paths count none.
* **exposed**: communication that nothing is computed beside, of a rank and step, and its share of
  the time of attention; **hidden** is the rest, as a share of communication.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that a report says."""

    title: str
    command: str
    flags: Sequence[str]
    machine: Mapping[str, str]
    results: Sequence[Result]
    reference: str | None
    apart: Mapping[str, Difference]
    """In the steps that are judged."""
    apart_in_all_steps: Mapping[str, Difference]
    judged_steps: int
    tolerance: float
    faults: Sequence[str]
    entropy: float | None = None

    @property
    def ran(self) -> list[Result]:
        """The results of what ran."""
        return [result for result in self.results if result.status == RAN]

    @property
    def verdict(self) -> list[str]:
        """What is wrong, a sentence each, or one that says how near all are."""
        if self.faults or not self.apart:
            return list(self.faults) or ["there was nothing to compare"]
        worst = max(difference.relative for difference in self.apart.values())
        return [
            f"all losses of the first {self.judged_steps} steps agree with those of "
            f"{self.reference} within {worst:.1e} (allowed: {self.tolerance:.0e})"
        ]


def rows(comparison: Comparison) -> dict[str, list[str]]:
    """Return the cells of every variant that ran, by its name."""
    return {result.name: list(_cells(result, comparison)) for result in comparison.ran}


def write_report(comparison: Comparison, directory: Path) -> Path:
    """Write compare.md, compare.svg and compare.json; return the page."""
    page = directory / "compare.md"
    if comparison.reference:
        from megatron_burst.tools.compare.pictures import draw  # matplotlib: not for --collect

        picture = directory / "compare.svg"
        draw(comparison.ran, comparison.reference, comparison.entropy, picture)
    page.write_text(_page(comparison))
    (directory / "compare.json").write_text(json.dumps(as_json(comparison), indent=2) + "\n")
    return page


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return all that compare.json holds."""
    return asdict(comparison)


def _page(comparison: Comparison) -> str:
    others = [result for result in comparison.results if result.status != RAN]
    commands = (f"# {r.name}\n{shlex.join(r.command)}" for r in comparison.results if r.command)
    parts = [
        f"# {comparison.title}",
        "\n".join(f"**{text}.**  " for text in comparison.verdict),
        _table(["", *COLUMNS], [[name, *cells] for name, cells in rows(comparison).items()]),
        "![losses, times, memory and messages](compare.svg)" if comparison.reference else "",
        _WORDS.strip(),
    ]
    if others:
        why = _table(["not run", "", "why"], [[r.name, r.status, r.reason] for r in others])
        parts += ["## Not in the figures", why]
    parts += [
        "## How it was made",
        f"```bash\n{comparison.command}\n```",
        _table(["", ""], [list(item) for item in comparison.machine.items()]),
        "```bash\n" + "\n\n".join(commands) + "\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _cells(result: Result, comparison: Comparison) -> Iterable[str]:
    apart, exposed = comparison.apart.get(result.name), result.exposed or {}
    yield "reference" if apart is None else f"{apart.relative:.1e}"
    yield f"{result.losses[-1][1]:.4f}"
    yield _number(result.seconds_per_step, 1e3, "{:,.0f}")
    yield _number(result.tokens_per_second_per_gpu, 1, "{:,.0f}")
    yield _number(result.mfu, 100, "{:.1f}")
    yield _number(result.peak_memory_bytes, 2**-30, "{:.2f}")
    yield _number(result.bytes_sent_per_rank_per_step, 2**-20, "{:,.1f}")
    yield _number(exposed.get("exposed"), 1e3, "{:,.1f}")
    yield _number(exposed.get("share"), 100, "{:.0f}")
    yield _number(exposed.get("hidden"), 100, "{:.0f}")


def _number(value: float | None, factor: float, form: str) -> str:
    return "n/a" if value is None else form.format(value * factor)
