"""Draws the losses of training runs, and below them how far they are apart."""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_burst.tools.picture import save
from megatron_burst.tools.runlog import Series

_FEW = 4  # runs whose names fit into the panels
_SMALLEST = 1e-9  # what a logarithmic axis shows of equal losses


def draw_losses(losses: dict[str, Series], entropy: float | None, path: Path) -> None:
    """Writes every run's loss by step, the unigram entropy as a line, and where there are several
    runs the relative difference of each from the last one. The suffix of `path` is the format.
    """
    few = len(losses) <= _FEW
    height = (6 if len(losses) > 1 else 4.2) + (0 if few else 0.3 * len(losses) / 3 + 0.6)
    figure = Figure(figsize=(8 if few else 10, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if len(losses) > 1:
        curves, apart = figure.subplots(2, sharex=True, height_ratios=[3, 1.2])
        _draw_differences(apart, losses)
    else:
        apart = curves = figure.subplots()
    _draw_curves(curves, losses, entropy)
    apart.set_xlabel("step")
    apart.xaxis.set_major_locator(MaxNLocator(integer=True))
    if few:
        for axes in {curves, apart}:
            axes.legend()
    else:
        shown = curves.get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=3, handlelength=4)
    save(figure, path)


def _draw_curves(axes: Axes, losses: dict[str, Series], entropy: float | None) -> None:
    # Equal runs lie on each other: every later one is thinner and dashed, so that both are seen.
    for index, (name, series) in enumerate(losses.items()):
        width, dash = (4.5, "-") if index == 0 else (1.6, (2 * index, (4, 4)))
        axes.plot(
            *_columns(series),
            label=name,
            linewidth=width,
            linestyle=dash,
            color=_color(index, len(losses)),
            alpha=0.45 if index == 0 and len(losses) > 1 else 1,
        )
    if entropy is not None:
        label = f"unigram entropy of the corpus: {entropy:.3f}"
        axes.axhline(entropy, color="0.35", linestyle=":", label=label)
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)


def _draw_differences(axes: Axes, losses: dict[str, Series]) -> None:
    *others, last = losses
    for index, name in enumerate(others):
        pairs = zip(losses[name], losses[last], strict=True)
        apart = [(step, max(abs(a - b) / abs(b), _SMALLEST)) for (step, a), (_, b) in pairs]
        axes.plot(
            *_columns(apart),
            ".",
            markersize=4,
            color=_color(index, len(losses)),
            label=f"{name} to {last} (equal: 1e-9)",
        )
    axes.set_yscale("log")
    to_what = "relative\ndifference" if len(losses) <= _FEW else f"difference to\n{last}\n(0: 1e-9)"
    axes.set_ylabel(to_what)
    axes.grid(alpha=0.3)


def _color(index: int, runs: int) -> object:
    return f"C{index}" if runs <= 10 else matplotlib.colormaps["tab20"](index % 20)


def _columns(series: Series) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]
