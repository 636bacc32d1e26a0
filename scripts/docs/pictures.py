"""Draws the rooms of the package, a step of a ring, and the two rings of a backward.

    python scripts/docs/pictures.py

Writes docs/rooms.svg and docs/step.svg, of docs/how-it-works.md, and docs/rings.svg, of README.md.
Each room is a folder or file of the package.
"""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from pages import parser
from plot import save

ROOT = Path(__file__).parents[2]
# From the bottom: what a room does, and what it hands to those above.
ROOMS = {
    "config": ("the settings, a field for each flag", "BurstConfig"),
    "plans": ("which rank sends what to whom, and computes which tile when", "Plan of one rank"),
    "kernels": (
        "one tile of attention: FlashAttention 2 to 4, cuDNN, torch, CPU",
        "out, LSE, dQ dK dV",
    ),
    "transport": ("process groups, messages, time limits, errors with a name", "Communicator"),
    "attention": ("the loop over a plan; sums in float32; autograd", "ring_attention"),
    "reference": ("unsharded attention in float64, and what compares with it", "a difference"),
    "loss": ("LM head and cross entropy in chunks of tokens", "linear_cross_entropy"),
    "plugin": (
        "flags, layer specs, batches, checkpoints: where Megatron is attached",
        "a model that trains",
    ),
    "cpu_platform": ("stand-ins for a GPU's names, where there is none", "Megatron on a CPU"),
    "data_checks": ("whether checkpoints and data files are whole", "errors before training"),
    "tools": (
        "plan, doctor, compare, verify, gpu-check, trace, launch",
        "the command megatron-burst",
    ),
}
FIRST_WITH_MEGATRON = "plugin"
BLUE, ORANGE, GREEN, GREY, PALE = "#1667ad", "#d1620a", "#26803a", "#8a8f98", "#f3f5f8"
MARK: dict[str, Any] = {
    "ha": "center",
    "va": "center",
    "color": "white",
    "fontsize": 8,
    "bbox": {"boxstyle": "circle", "color": "#333"},
}
COPY, KERNEL, SUMS = 2.75, 1.75, 0.75  # lanes of a step, by their heights


def rooms(axes: Axes) -> None:
    """Draw a box for each room, each on those that it may import."""
    height, pitch, apart = 0.62, 0.78, 0.24  # of a box, to the next, more where Megatron begins
    first = [*ROOMS].index(FIRST_WITH_MEGATRON)
    for level, (name, (work, gives)) in enumerate(ROOMS.items()):
        y, edge = level * pitch, BLUE
        if level >= first:
            y, edge = y + apart, ORANGE
        middle = y + height / 2
        box(axes, (0, y, 8.2, height), PALE, edge)
        axes.text(0.15, middle, name, va="center", fontweight="bold", fontsize=11, color=edge)
        axes.text(1.75, middle, work, va="center")
        axes.text(8.4, middle, gives, va="center", color=GREY)
    border, top = first * pitch - 0.04, len(ROOMS) * pitch + apart
    axes.plot([0, 10.7], [border, border], "--", color=GREY, linewidth=1)
    words = "only above this line is Megatron imported"
    axes.text(10.7, border + 0.05, words, ha="right", color=GREY)
    arrow(axes, (-0.3, top - 0.2), (-0.3, 0), GREY)
    words = "imports only what is below"
    axes.text(-0.5, top / 2, words, rotation=90, va="center", ha="right", color=GREY)
    axes.set(xlim=(-0.9, 10.9), ylim=(-0.15, top))


def step(axes: Axes) -> None:
    """Draw three steps of a rank in a ring, of which the middle one is named."""
    for lane, words in ((COPY, "messages"), (KERNEL, "kernel"), (SUMS, "float32 sums")):
        axes.text(-0.15, lane + 0.25, words, ha="right", va="center", fontweight="bold")
    for number, start in enumerate((0.0, 3.3, 6.6)):
        axes.plot([start, start], [0.6, 3.75], ":", color=GREY, linewidth=1)
        axes.text(start + 1.6, 3.62, f"step {number}", ha="center", color=GREY)
        if number < 2:
            box(axes, (start + 0.08, COPY, 2.2, 0.5), "#dceaf6", BLUE)
            axes.text(
                start + 1.18, COPY + 0.25, f"K, V of step {number + 1}", ha="center", va="center"
            )
            arrow(axes, (start + 2.3, COPY + 0.2), (start + 3.42, KERNEL + 0.5), BLUE)
        owner = "own K, V" if number == 0 else f"K, V of step {number}"
        box(axes, (start + 0.12, KERNEL, 2.65, 0.5), "#fbe6d6", ORANGE)
        axes.text(start + 1.44, KERNEL + 0.25, f"own Q x {owner}", ha="center", va="center")
        box(axes, (start + 2.42, SUMS, 0.75, 0.5), "#dff0e3", GREEN)
        axes.text(start + 2.8, SUMS + 0.25, "merge", ha="center", va="center")
        arrow(axes, (start + 2.6, KERNEL), (start + 2.75, SUMS + 0.5), GREEN)
    # The step in the middle, by numbers that are explained below.
    for x, y, number in ((3.3, COPY + 0.6, 1), (3.3, KERNEL + 0.1, 2), (6.6, COPY + 0.25, 3)):
        axes.text(x, y, str(number), **MARK)
    for x, number, words in (
        (0.0, 1, "post: send what is here,\nreceive what comes next"),
        (3.3, 2, "compute the tiles of\nwhat has arrived"),
        (6.6, 3, "wait until the messages\nhave arrived"),
    ):
        axes.text(x + 0.1, 0.1, str(number), **MARK)
        axes.text(x + 0.35, 0.1, words, va="center")
    axes.set(xlim=(-1.4, 9.9), ylim=(-0.25, 3.85))


def rings(axes: Axes) -> None:
    """Draw what each of four ranks passes on in a step of a backward, and how much of it."""
    for left, name, stays, moves, comes, sizes in (
        (0.0, "kv ring", "Q, dO", "K, V", "dK, dV", (4.0, 1.0)),
        (5.4, "query ring", "K, V", "Q, dO, LSE, delta", "dQ", (3 + 8 / 256, 3 + 8 / 256)),
    ):
        axes.text(left + 2.2, 2.62, name, ha="center", fontweight="bold", fontsize=12)
        for rank, (x, y) in enumerate(((0.0, 1.75), (3.1, 1.75), (3.1, 0.5), (0.0, 0.5))):
            box(axes, (left + x, y, 1.3, 0.5), PALE, GREY)
            words = f"rank {rank}: {stays}"
            axes.text(left + x + 0.65, y + 0.25, words, ha="center", va="center", fontsize=8.5)
        for start, end in (
            ((1.35, 2.08), (3.05, 2.08)),
            ((3.9, 1.7), (3.9, 1.05)),
            ((3.05, 0.68), (1.35, 0.68)),
            ((0.5, 1.05), (0.5, 1.7)),
        ):
            arrow(axes, (left + start[0], start[1]), (left + end[0], end[1]), BLUE)
        axes.text(left + 2.2, 2.2, moves, ha="center", color=BLUE)
        axes.text(left + 2.2, 1.42, f"{comes}: to the owner", ha="center", color=ORANGE)
        words = "sent in a step: {:.1f} times q; with 4 query heads a kv head {:.1f}".format(*sizes)
        axes.text(left + 2.2, 0.08, words, ha="center")
    axes.set(xlim=(-0.2, 10.0), ylim=(-0.15, 2.95))


def box(axes: Axes, place: tuple[float, float, float, float], fill: str, edge: str) -> None:
    x, y, width, height = place
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=fill, edgecolor=edge))


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=color))


PICTURES = {
    "docs/rooms.svg": (rooms, (9.8, 0.69 * len(ROOMS))),
    "docs/step.svg": (step, (9.5, 3.4)),
    "docs/rings.svg": (rings, (9.5, 2.9)),
}


def draw(name: str, path: Path) -> None:
    """Write one of the pictures to `path`, in its suffix's format."""
    paint, size = PICTURES[name]
    with rc_context({"font.size": 9.5}):
        figure = Figure(figsize=size, facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        paint(axes)
        axes.axis("off")
        save(figure, path)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    for picture in PICTURES:
        draw(picture, ROOT / picture)
