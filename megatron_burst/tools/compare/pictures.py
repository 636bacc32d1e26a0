"""The picture of a comparison: the losses of every step, and how far they are apart."""

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
    """Write the losses of the variants that ran; the suffix of `path` is the format."""
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    (expected,) = (dict(result.losses) for result in results if result.name == reference)
    for index, result in enumerate(results):
        color = matplotlib.colormaps["tab20"](index % 20)
        losses = dict(result.losses)
        (line,) = left.plot(list(losses), list(losses.values()), label=result.name, color=color)
        # Equal runs lie on each other: the reference is wide, the others are dashed upon it.
        if result.name == reference:
            line.set(linewidth=4.5, alpha=0.45)
            continue
        line.set(linewidth=1.6, linestyle=(2 * index, (4, 4)))
        far = [abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses.items()]
        right.plot(list(losses), [max(x, _SMALLEST) for x in far], ".", markersize=4, color=color)
    if entropy is not None:
        left.axhline(entropy, color="0.35", linestyle=":", label=f"unigram entropy {entropy:.3f}")
    left.legend(fontsize=7)
    right.set_yscale("log")
    _by_step(left, "loss (nats per token)")
    _by_step(right, f"relative difference to {reference} (equal: {_SMALLEST:.0e})")
    figure.savefig(path)


def _by_step(axes: Axes, title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
