"""Draws how far losses are apart at every step; lines that lie on each other show nothing."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_burst.tools.compare.results import Result
from megatron_burst.tools.replacing import replacing

NAME = "differences.svg"


def draw(ran: Sequence[Result], reference: str, directory: Path) -> str:
    """Write the picture beside the page; return what the page shows of it.

    All of `ran` have logged the same steps. Equal losses are drawn at the last bit of a float32.
    """
    if len(ran) < 2:
        return ""
    if not find_spec("matplotlib"):
        return "No picture of the differences: matplotlib is not installed."
    from matplotlib.figure import Figure

    expected = next(result.losses for result in ran if result.name == reference)
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for result in ran:
        if result.name != reference:
            pairs = zip(result.losses, expected, strict=True)
            apart = [max(abs(a - b) / abs(b), 2**-24) if b else 1.0 for (_, a), (_, b) in pairs]
            axes.plot([step for step, _ in expected], apart, label=result.name, linewidth=1)
    axes.set(xlabel="step", ylabel=f"|loss - {reference}| / {reference}", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with replacing(directory / NAME) as path:
        figure.savefig(path)
    return f"![Differences of the losses at every step]({NAME})"
