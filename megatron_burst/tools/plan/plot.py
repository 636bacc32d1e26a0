"""Draws what was found: tokens a second over memory."""

from collections.abc import Sequence
from pathlib import Path

from megatron_burst.tools.plan.memory import GIB, usable
from megatron_burst.tools.plan.ranking import Candidate
from megatron_burst.tools.replacing import replacing


def draw(found: Sequence[Candidate], path: str) -> None:
    """Write a picture of all ways, the fastest named.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install megatron-burst[plot]") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes, load = figure.subplots(), found[0].load
    for place, each in enumerate(found, 1):
        point = each.memory.total / GIB, each.time.tokens_per_gpu
        axes.plot(*point, "o" if each.fits else "x", color="C0" if each.fits else "C3")
        sizes = f"{place}: TP {each.load.tensor} CP {each.load.context} PP {each.load.pipeline}"
        if place <= 5:
            label = f"{sizes}, {each.name}"
            axes.annotate(label, point, (4, 2), textcoords="offset points", fontsize=7)
    axes.axvline(usable(load.cluster) / GIB, color="0.5", linewidth=0.8)
    axes.set(xlabel="GiB of a GPU (line: what may be counted)", ylabel="tokens/s a GPU")
    axes.set_title(f"{load.gpus} GPUs of {load.cluster.name}, {load.tokens} tokens", fontsize=9)
    with replacing(Path(path)) as new:
        figure.savefig(new)
