"""The report of a comparison: one HTML page with everything in it, and one JSON."""

import base64
import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_burst.tools.compare.pictures import draw_messages, draw_speed
from megatron_burst.tools.compare.results import FAILED, RAN, Apart, Result
from megatron_burst.tools.figure import draw_losses

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 1180px; margin: 2rem auto; padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
p.verdict { font-size: 1.1rem; padding: .7rem 1rem; border-left: 6px solid; background: #f5f7f8; }
p.good { border-color: #2e7d32; } p.bad { border-color: #c62828; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; border-bottom: 1px solid #ddd; text-align: right;
         vertical-align: bottom; }
td, th:first-child { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.reference td { background: #f0f0f0; } td.words { text-align: left; white-space: normal; }
th span { display: block; font-weight: normal; color: #666; font-size: .82rem; }
img { width: 100%; height: auto; display: block; margin: .6rem 0; }
code, pre { font: .84rem/1.45 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f7f8; padding: .6rem .8rem; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem 1.2rem; }
summary { cursor: pointer; margin: .5rem 0; font-weight: 600; }
"""

_COLUMNS = (
    ("", ""),
    ("loss apart", "relative"),
    ("last loss", "nats"),
    ("step", "ms, median"),
    ("tokens/s", "per rank"),
    ("MFU", "%"),
    ("memory", "GiB, peak"),
    ("sent", "MiB, rank and step"),
    ("exposed", "ms, rank and step"),
    ("exposed", "% of attention"),
    ("by the plan", "% of attention"),
)

_WORDS = {
    "loss apart": "|loss - reference| / reference, the largest over the first steps "
    "that are judged. Later steps are shown and not judged: training amplifies the last bit of a "
    "float, and right runs that round differently drift apart.",
    "step": "the median time of a step, the first five left out where there are ten.",
    "MFU": "model FLOPs of a step (attention's causal half counted as a half, nothing counted "
    "twice that runs again) over time x GPUs x peak; n/a where the peak is not known, as of a CPU.",
    "memory": "the peak of the fullest rank: of tensors on the GPU; without a GPU, what a whole "
    "process had in memory with its libraries, less where the system was short of it.",
    "sent": "payload bytes that attention sends; Megatron's own paths do not count theirs.",
    "exposed": "the time for which attention waits for messages, in the traced steps. A part of it "
    "is waiting for a peer that has not come yet, which no link cures.",
    "by the plan": "what waiting the plan has, with the mean times of its tiles and the quickest "
    "messages of each channel; see python -m megatron_burst.tools.trace.",
}


_TIMELINES = (
    "Above, the attention calls of the last traced step, with the waiting in them. Below, one of "
    "them close, forward and backward. For chrome://tracing or Perfetto, python -m "
    "megatron_burst.tools.trace joins what is in runs/NAME/trace."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that a report says."""

    title: str
    command: str
    flags: Sequence[str]
    machine: Mapping[str, str]
    results: Sequence[Result]
    reference: str | None
    apart: Mapping[str, Apart]
    judged_steps: int
    tolerance: float
    faults: Sequence[str]
    entropy: float | None = None
    timelines: Mapping[str, Path] | None = None

    @property
    def ran(self) -> list[Result]:
        """The results of what ran."""
        return [result for result in self.results if result.status == RAN]


def write_report(comparison: Comparison, directory: Path) -> tuple[Path, Path]:
    """Write compare.html and compare.json, and the pictures beside them; return both files."""
    pictures = _draw(comparison, directory)
    page, data = directory / "compare.html", directory / "compare.json"
    page.write_text(_page(comparison, pictures))
    content = asdict(comparison)
    content["timelines"] = {name: str(path) for name, path in (comparison.timelines or {}).items()}
    data.write_text(json.dumps(content, indent=2) + "\n")
    return page, data


def _draw(comparison: Comparison, directory: Path) -> dict[str, Path]:
    ran = comparison.ran
    if not ran:
        return {}
    losses = {result.name: result.losses for result in ran}
    if comparison.reference:  # last, for the others are held against the last
        losses[comparison.reference] = losses.pop(comparison.reference)
    files = {name: directory / f"{name}.svg" for name in ("loss", "speed", "messages")}
    draw_losses(losses, comparison.entropy, files["loss"])
    draw_speed(ran, files["speed"])
    draw_messages(ran, files["messages"])
    return files


def _page(comparison: Comparison, pictures: Mapping[str, Path]) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(comparison.title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(comparison.title)}</h1>",
        f"<p>{_text(_where(comparison))}</p>",
        _verdict(comparison),
        "<h2>Figures</h2>",
        _table(comparison),
        *_left_out(comparison),
    ]
    for name, title in (("loss", "Loss"), ("speed", "Time and memory"), ("messages", "Messages")):
        if name in pictures:
            parts += [f"<h2>{title}</h2>", _image(pictures[name], title)]
    parts += _timelines(comparison)
    parts += ["<h2>What the columns mean</h2>", _definitions(), "<h2>How it was made</h2>"]
    parts += [f"<pre>{_text(comparison.command)}</pre>", _machine(comparison.machine)]
    parts += _commands(comparison.results)
    return "\n".join([*parts, "</body></html>\n"])


def _where(comparison: Comparison) -> str:
    ranks = max((result.ranks for result in comparison.ran), default=0)
    machine = comparison.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in machine if "-" in name)
    return (
        f"{ranks} ranks on {machine['device']} ({machine['cores']} cores); "
        f"torch {machine['torch']}, {versions}"
    )


def _verdict(comparison: Comparison) -> str:
    lines = [f"{text}." for text in comparison.faults]
    if not comparison.faults and comparison.apart:
        worst = max(comparison.apart.values(), key=lambda apart: apart.first.relative).first
        lines = [
            f"All losses of the first {comparison.judged_steps} steps agree with those of "
            f"{comparison.reference} within {worst.relative:.1e} (allowed: "
            f"{comparison.tolerance:.0e})."
        ]
    look = "bad" if comparison.faults else "good"
    return (
        f'<p class="verdict {look}">{"<br>".join(map(_text, lines)) or "Nothing to compare."}</p>'
    )


def _table(comparison: Comparison) -> str:
    head = "".join(f"<th>{_text(name)}<span>{_text(unit)}</span></th>" for name, unit in _COLUMNS)
    rows = []
    for result in comparison.ran:
        look = ' class="reference"' if result.name == comparison.reference else ""
        cells = "".join(f"<td>{_text(value)}</td>" for value in _cells(result, comparison))
        rows.append(f"<tr{look}>{cells}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _cells(result: Result, comparison: Comparison) -> Iterable[str]:
    apart = comparison.apart.get(result.name)
    is_reference = result.name == comparison.reference
    yield result.name
    yield "reference" if is_reference else f"{apart.first.relative:.1e}" if apart else "n/a"
    yield f"{result.losses[-1][1]:.4f}"
    yield _number(result.seconds_per_step, 1e3, "{:,.0f}")
    yield _number(result.tokens_per_second_per_gpu, 1, "{:,.0f}")
    yield _number(result.mfu, 100, "{:.1f}")
    yield _number(result.peak_memory_bytes, 2**-30, "{:.2f}")
    yield _number(result.bytes_sent_per_rank_per_step, 2**-20, "{:,.1f}")
    exposed = result.exposed or {}
    ranks_and_steps = exposed.get("training_steps", 1) * exposed.get("ranks", 1)
    yield _number(exposed.get("waiting"), 1e3 / ranks_and_steps, "{:,.1f}")
    yield _number(exposed.get("share"), 100, "{:.0f}")
    yield _number(exposed.get("predicted_share"), 100, "{:.0f}")


def _left_out(comparison: Comparison) -> list[str]:
    others = [result for result in comparison.results if result.status != RAN]
    if not others:
        return []
    rows = "".join(
        f"<tr><td>{_text(r.name)}</td><td>{_text(r.status)}</td>"
        f'<td class="words">{_text(r.reason)}</td></tr>'
        for r in others
    )
    head = '<tr><th>variant</th><th></th><th style="text-align:left">why</th></tr>'
    body = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
    return ["<h2>Not in the figures</h2>", f'<div class="wide">{body}</div>']


def _timelines(comparison: Comparison) -> list[str]:
    if not comparison.timelines:
        return []
    parts = ["<h2>Timelines of a step</h2>", f"<p>{_text(_TIMELINES)}</p>"]
    for number, (name, path) in enumerate(comparison.timelines.items()):
        state = " open" if number == 0 else ""
        image = _image(path, f"timeline of {name}")
        parts.append(f"<details{state}><summary>{_text(name)}</summary>{image}</details>")
    return parts


def _definitions() -> str:
    words = "".join(f"<dt>{_text(w)}</dt><dd>{_text(m)}</dd>" for w, m in _WORDS.items())
    return f"<dl>{words}</dl>"


def _machine(machine: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in machine.items())
    return f"<table>{rows}</table>"


def _commands(results: Sequence[Result]) -> list[str]:
    text = "\n\n".join(
        f"# {result.name}{' (failed)' if result.status == FAILED else ''}\n{_line(result.command)}"
        for result in results
        if result.command
    )
    return [f"<details><summary>All commands</summary><pre>{_text(text)}</pre></details>"]


def _line(command: Sequence[str]) -> str:
    return shlex.join(command)


def _image(path: Path, words: str) -> str:
    kind = {".svg": "svg+xml", ".png": "png"}[path.suffix]
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{_text(words)}" src="data:image/{kind};base64,{data}">'


def _number(value: float | None, factor: float, form: str) -> str:
    return "n/a" if value is None else form.format(value * factor)


def _text(words: str) -> str:
    return html.escape(words)
