"""Bars of what the variants of a comparison took: time, memory, messages, waiting."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_burst.tools.compare.results import Result
from megatron_burst.tools.picture import save

_COLORS = {
    "CP=1": "#555555",
    "megatron": "#76b900",
    "burst": "#1f77b4",
    "ring": "#ff7f0e",
    "allgather": "#9467bd",
    "ulysses": "#8c564b",
}
_LATE, _ON_THE_WAY, _PLANNED = "#f2b8a8", "#d62728", "#111111"


def draw_speed(results: Sequence[Result], path: Path) -> None:
    """Write the time of a step and the peak memory of every variant that ran."""
    figure, (time, memory) = _figure(len(results))
    _bars(time, results, [_scaled(r.seconds_per_step, 1e3) for r in results], "{:,.0f}")
    time.set_title("time of a step (ms, median)")
    _bars(memory, results, [_scaled(r.peak_memory_bytes, 2**-30) for r in results], "{:.2f}")
    memory.set_title("peak memory of the fullest rank (GiB)")
    save(figure, path)


def draw_messages(results: Sequence[Result], path: Path) -> None:
    """Write the bytes sent, and the share of attention's time that was waiting."""
    figure, (sent, exposed) = _figure(len(results), legend=True)
    amounts = [_scaled(r.bytes_sent_per_rank_per_step, 2**-20) for r in results]
    _bars(sent, results, amounts, "{:,.1f}")
    sent.set_title("sent for attention by a rank in a step (MiB)")
    for row, result in enumerate(results):
        if not result.exposed:
            exposed.text(0, row, " not traced", va="center", color="0.4", fontsize=9)
            continue
        whole, total = result.exposed, result.exposed["seconds"] / 100
        late, waiting = whole["late"] / total, whole["waiting"] / total
        exposed.barh(row, late, 0.66, color=_LATE)
        exposed.barh(row, waiting - late, 0.66, left=late, color=_ON_THE_WAY)
        planned = 100 * whole["predicted_share"]
        exposed.plot([planned, planned], [row - 0.4, row + 0.4], color=_PLANNED, linewidth=2)
        exposed.text(waiting, row, f" {waiting:.0f}", va="center", fontsize=9)
    exposed.set_title("exposed: waiting, of attention's time (%)")
    exposed.set_xlim(0, 108)
    handles = [
        Patch(color=_LATE, label="until the peer came"),
        Patch(color=_ON_THE_WAY, label="for messages on their way"),
        Patch(color=_PLANNED, label="by the plan"),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def _figure(rows: int, *, legend: bool = False) -> tuple[Figure, Sequence[Axes]]:
    height = 1.0 + 0.33 * rows + 0.35 * legend
    figure = Figure(figsize=(11, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes in panels:
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    return figure, panels


def _bars(axes: Axes, results: Sequence[Result], values: Sequence[float | None], form: str) -> None:
    for row, (result, value) in enumerate(zip(results, values, strict=True)):
        if value is None:
            axes.text(0, row, " n/a", va="center", color="0.4", fontsize=9)
            continue
        axes.barh(row, value, 0.66, color=_color(result.name))
        axes.text(value, row, " " + form.format(value), va="center", fontsize=9)
    axes.set_yticks(range(len(results)), [result.name for result in results])
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * max([value for value in values if value], default=1.0))


def _color(name: str) -> str:
    return next(color for start, color in _COLORS.items() if name.startswith(start))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
