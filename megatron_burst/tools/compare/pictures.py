"""One picture of a comparison: losses, how far they are apart, time, memory, messages, waiting."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_burst.tools.compare.results import Result

_SMALLEST = 1e-9  # what a logarithmic axis shows of equal losses


def draw(results: Sequence[Result], reference: str, entropy: float | None, path: Path) -> None:
    """Write what the variants that ran took; the suffix of `path` is the format."""
    rows = 1 + 0.3 * len(results)
    figure = Figure(figsize=(12, 6 + 2 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, 2, height_ratios=[6, rows, rows])
    _draw_losses(grid[0, 0], results, reference, entropy)
    _draw_differences(grid[0, 1], results, reference)
    panels = {
        "time of a step (ms, median)": [_scaled(r.seconds_per_step, 1e3) for r in results],
        "peak memory of the fullest rank (GiB)": [
            _scaled(r.peak_memory_bytes, 2**-30) for r in results
        ],
        "sent for attention by a rank in a step (MiB)": [
            _scaled(r.bytes_sent_per_rank_per_step, 2**-20) for r in results
        ],
        "exposed communication, of attention's time (%)": [
            _scaled(r.exposed["share"] if r.exposed else None, 100) for r in results
        ],
    }
    names = [result.name for result in results]
    for axes, (title, values) in zip(grid[1:].flat, panels.items(), strict=True):
        axes.set_title(title)
        _bars(axes, names, values)
    figure.savefig(path)


def _draw_losses(
    axes: Axes, results: Sequence[Result], reference: str, entropy: float | None
) -> None:
    # Equal runs lie on each other: the reference is wide, the others are dashed upon it.
    for index, result in enumerate(results):
        is_reference = result.name == reference
        width, dash = (4.5, "-") if is_reference else (1.6, (2 * index, (4, 4)))
        alpha = 0.45 if is_reference else 1.0
        (line,) = axes.plot(*zip(*result.losses, strict=True), label=result.name, alpha=alpha)
        line.set(linewidth=width, linestyle=dash, color=_color(index))
    if entropy is not None:
        axes.axhline(entropy, color="0.35", linestyle=":", label=f"unigram entropy {entropy:.3f}")
    axes.set_title("loss (nats per token)")
    axes.legend(fontsize=7)
    _steps(axes)


def _draw_differences(axes: Axes, results: Sequence[Result], reference: str) -> None:
    (expected,) = (dict(result.losses) for result in results if result.name == reference)
    for index, result in enumerate(results):
        apart = {
            step: max(abs(loss - expected[step]) / abs(expected[step]), _SMALLEST)
            for step, loss in result.losses
            if result.name != reference
        }
        axes.plot(list(apart), list(apart.values()), ".", markersize=4, color=_color(index))
    axes.set_yscale("log")
    axes.set_title(f"relative difference to {reference} (equal: {_SMALLEST:.0e})")
    _steps(axes)


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float | None]) -> None:
    for row, value in enumerate(values):
        axes.barh(row, value or 0.0, 0.66, color=_color(row))
        text = " n/a" if value is None else f" {value:,.4g}"
        axes.text(value or 0.0, row, text, va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.16 * max([value for value in values if value], default=1.0))
    axes.grid(axis="x", alpha=0.3)


def _steps(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _color(index: int) -> object:
    return matplotlib.colormaps["tab20"](index % 20)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
