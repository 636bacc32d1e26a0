"""Draws the losses of training runs, and below them how far they are apart."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_burst.tools.runlog import Series


def draw_losses(losses: dict[str, Series], entropy: float | None, path: Path) -> None:
    """Writes a PNG: every run's loss by step, the unigram entropy as a line, and where there are
    several runs the relative difference of each from the last one.
    """
    figure = Figure(figsize=(8, 6 if len(losses) > 1 else 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    if len(losses) > 1:
        curves, apart = figure.subplots(2, sharex=True, height_ratios=[3, 1.2])
        _draw_differences(apart, losses)
    else:
        apart = curves = figure.subplots()
    _draw_curves(curves, losses, entropy)
    apart.set_xlabel("step")
    figure.savefig(path)


def _draw_curves(axes: Axes, losses: dict[str, Series], entropy: float | None) -> None:
    # Equal runs lie on each other: every later one is thinner and dashed, so that both are seen.
    for index, (name, series) in enumerate(losses.items()):
        width, dash = (4.5, "-") if index == 0 else (1.6, "--")
        axes.plot(
            *_columns(series),
            label=name,
            linewidth=width,
            linestyle=dash,
            color=f"C{index}",
            alpha=0.45 if index == 0 and len(losses) > 1 else 1,
        )
    if entropy is not None:
        label = f"unigram entropy of the corpus: {entropy:.3f}"
        axes.axhline(entropy, color="0.35", linestyle=":", label=label)
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_differences(axes: Axes, losses: dict[str, Series]) -> None:
    *others, last = losses
    smallest = 1e-9  # what a logarithmic axis shows of equal losses
    for index, name in enumerate(others):
        pairs = zip(losses[name], losses[last], strict=True)
        apart = [(step, max(abs(a - b) / abs(b), smallest)) for (step, a), (_, b) in pairs]
        axes.plot(
            *_columns(apart),
            ".",
            markersize=4,
            color=f"C{index}",
            label=f"{name} to {last} (equal: 1e-9)",
        )
    axes.set_yscale("log")
    axes.set_ylabel("relative\ndifference")
    axes.grid(alpha=0.3)
    axes.legend()


def _columns(series: Series) -> tuple[list[int], list[float]]:
    return [step for step, _ in series], [value for _, value in series]
