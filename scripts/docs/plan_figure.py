"""Draws the plans of all ranks: which tiles are computed at each step, and what is sent.

    python scripts/docs/plan_figure.py

Writes docs/plan.svg and docs/plan-double.svg. A row is a rank, a column a step; 4 ranks. Nothing is
drawn that is not read from the plans.
"""

from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path as Curve
from numpy.typing import NDArray
from pages import parser
from plot import save

from megatron_burst.plans.schedules.plan import Channel, Plan, Send, Tiles
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.layout import Layout, zigzag
from megatron_burst.plans.visibility.mask import Mask

NODES = {"docs/plan.svg": 1, "docs/plan-double.svg": 2}
RANKS = 4
TOKENS = 16 * RANKS  # of a score matrix: 8 a chunk
GREY, VISIBLE, OWN = "#8a8f98", "#e9ebee", "#c9ced6"
# One for each rank's blocks; dark enough to be read as text, apart for the colour-blind, too.
COLORS = ("#1667ad", "#d1620a", "#26803a", "#8b3fb0")
# Inches: of a cell of the grid, of a score matrix in it, of the space left of the grid, above it,
# between nodes, of the key.
COLUMN, ROW, MATRIX, LEFT, TITLE, NODE, KEY = 1.62, 1.32, 0.92, 0.85, 0.75, 0.42, 2.1
DASHES = (0, (3.2, 1.8))  # of gradients
BETWEEN = (Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN)


def scores(layout: Layout, rank: int, blocks: Sequence[Tiles]) -> NDArray[np.int_]:
    """Return the score matrix: 0 masked, 1 visible, 2 to the rank's queries, 3 + owner computed."""
    drawn = np.tril(np.ones((layout.tokens, layout.tokens), int))
    drawn[layout.positions(rank)] *= 2
    for tiles, cell in ((block, cell) for block in blocks for cell in block.cells):
        queries = layout.positions(tiles.query_owner)[cell.queries.as_slice]
        keys = layout.positions(tiles.key_owner)[cell.keys.as_slice]
        i, j = cell.band.visible(len(queries), len(keys)).nonzero()
        drawn[queries[i], keys[j]] = 3 + tiles.key_owner
    return drawn


def columns(step: int, send: Send) -> tuple[int, int]:
    """Return from which column to which a message goes that is posted in `step`.

    A block is there for the step after the one it lands in; a gradient was made before it leaves,
    and is added at the end of the step it lands in.
    """
    return (step - 1, send.lands) if send.item.kind.is_result else (step, send.lands + 1)


def corner(grid: Grid, rank: int, step: int, top: float) -> tuple[float, float]:
    """Return where the cell of a rank and a step begins; y goes down."""
    node, local = grid.coordinates(rank)
    return LEFT + step * COLUMN, top + (node * grid.ranks_per_node + local) * ROW + node * NODE


def draw_scores(axes: Axes, drawn: NDArray[np.int_], x: float, y: float, size: float) -> None:
    palette = [tuple(bytes.fromhex(c[1:])) for c in ("#ffffff", VISIBLE, OWN, *COLORS)]
    image = np.array(palette, np.uint8)[drawn]
    axes.imshow(image, extent=(x, x + size, y + size, y), interpolation="none")
    cuts = np.arange(1, 2 * RANKS) * size / (2 * RANKS)
    axes.hlines(y + cuts, x, x + size, colors="white", linewidths=0.5)
    axes.vlines(x + cuts, y, y + size, colors="white", linewidths=0.5)
    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=GREY, linewidth=0.8))


def draw_plans(axes: Axes, title: str, plans: Sequence[Plan], ring: Ring, top: float) -> None:
    """Draw a grid of ranks and steps."""
    grid, layout = ring.grid, zigzag(TOKENS, RANKS)
    axes.text(0.12, top - 0.53, title, fontsize=13, fontweight="bold")
    for number in range(max(len(plan.steps) for plan in plans)):
        axes.text(LEFT + number * COLUMN + MATRIX / 2, top - 0.3, f"step {number}", ha="center")
    for plan in plans:
        rank, (node, local) = plan.rank, grid.coordinates(plan.rank)
        _, y = corner(grid, rank, 0, top)
        axes.text(0.12, y + MATRIX / 2, f"rank {rank}", va="center", fontweight="bold")
        if grid.nodes > 1 and local == 0:
            axes.text(0.12, y - 0.05, f"node {node}", color=GREY)
        for number, step in enumerate(plan.steps):
            x, _ = corner(grid, rank, number, top)
            if step.blocks:
                draw_scores(axes, scores(layout, rank, step.blocks), x, y, MATRIX)
            for owner in {tiles.key_owner for tiles in step.blocks}:
                words = "own keys" if owner == rank else f"keys of rank {owner}"
                label(axes, x, y - 0.05, words, owner)
            for send in step.sends:
                draw_message(axes, send, rank, number, grid, top)
        if any(send.item.kind.is_result for send in plan.sends):
            label(axes, x, y + MATRIX + 0.15, "dK and dV whole", rank)


def label(axes: Axes, x: float, y: float, words: str, owner: int) -> None:
    axes.text(x + MATRIX / 2, y, words, color=COLORS[owner], ha="center", fontsize=8.5)


def draw_message(axes: Axes, send: Send, rank: int, step: int, grid: Grid, top: float) -> None:
    """Draw an arrow from where a message leaves to where it is used."""
    first, last = columns(step, send)
    gradient = send.item.kind.is_result
    shift = 0.14 if gradient else -0.14
    (x0, y0), (x1, y1) = corner(grid, rank, first, top), corner(grid, send.peer, last, top)
    points = [(x0 + MATRIX + 0.03, y0 + 0.5 + shift), (x1 - 0.03, y1 + 0.4 + shift)]
    if last - first > 1:  # below its row until its last step is over, past the other cells
        lane = y0 + MATRIX + (0.16 if gradient else 0.08)
        points[1:1] = [(x0 + MATRIX + 0.13, lane), (x1 - COLUMN + MATRIX + 0.1, lane)]
    arrow(axes, points, COLORS[send.item.owner], gradient, send.channel in BETWEEN)


def arrow(
    axes: Axes, points: Sequence[tuple[float, float]], color: str, dashed: bool, thick: bool
) -> None:
    style: dict[str, Any] = {"linestyle": DASHES if dashed else "-", "color": color}
    style |= {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 2.8 if thick else 1.5}
    axes.add_patch(FancyArrowPatch(path=Curve(list(points)), **style))


def draw_key(axes: Axes, ring: Ring) -> None:
    """How to read the figure: one large score matrix with its axes, and the signs in words."""
    size, x, y, layout = 1.35, 0.62, 0.5, zigzag(TOKENS, RANKS)
    draw_scores(axes, scores(layout, 0, ()), x, y, size)
    holder = {chunk.start: rank for rank, shard in enumerate(layout.shards) for chunk in shard}
    for index, chunk in enumerate(sorted(holder)):
        place, rank = (index + 0.5) * size / (2 * RANKS), holder[chunk]
        for at in ((x + place, y - 0.1), (x - 0.1, y + place)):
            axes.text(*at, str(rank), color=COLORS[rank], ha="center", va="center", fontsize=8)
    axes.text(x + size / 2, y - 0.22, "keys, by the rank that holds them", ha="center", fontsize=8)
    axes.text(x - 0.22, y + size / 2, "queries", ha="right", va="center", rotation=90, fontsize=8)
    title = f"{RANKS} ranks, {ring.grid}, zigzag"
    axes.text(2.7, 0.3, title, fontsize=13, fontweight="bold")
    chunks = 2 * RANKS
    words = f"Each square is the whole score matrix, cut into {chunks} x {chunks} chunks.\n"
    axes.text(2.7, 0.85, f"{words}Rank r holds the chunks r and {chunks - 1} - r of the sequence.")
    for row, (color, meaning) in enumerate(
        (
            (VISIBLE, "what the causal mask lets through"),
            (OWN, "what a rank's own queries see (left, rank 0's)"),
            (COLORS[1], "computed in this step, in the colour of the owner of the keys"),
        )
    ):
        axes.add_patch(Rectangle((2.7, 0.99 + 0.23 * row), 0.24, 0.14, facecolor=color))
        axes.text(3.05, 1.1 + 0.23 * row, meaning)
    arrows = {"K and V": (False, False), "gradients": (True, False), "between nodes": (False, True)}
    for number, (meaning, style) in enumerate(list(arrows.items())[: 2 + (ring.grid.nodes > 1)]):
        left = 2.7 + 1.45 * number
        arrow(axes, ((left, 1.74), (left + 0.35, 1.74)), GREY, *style)
        axes.text(left + 0.42, 1.78, meaning)


def draw(nodes: int, path: Path) -> None:
    """Write the forward and the backward of a causal kv ring to `path`, in its suffix's format."""
    grid = Grid(tuple(batched(range(RANKS), RANKS // nodes)))
    tiling = Tiling(zigzag(TOKENS, RANKS), Mask.causal())
    ring = Ring(tiling, grid, chained=False)
    plans = [[make(rank) for rank in range(RANKS)] for make in (ring.forward, ring.backward)]
    steps = max(len(plan.steps) for plan in plans[1])
    panel = RANKS * ROW + (nodes - 1) * NODE + TITLE
    width, height = max(LEFT + steps * COLUMN, 8.9), 2 * panel + KEY
    title = "Backward: K and V circulate, dK and dV are returned to their owner"
    titles = "Forward: K and V circulate", title + (", summed once a node" if nodes > 1 else "")
    with rc_context({"font.size": 9.5, "image.composite_image": False}):
        figure = Figure(figsize=(width, height), facecolor="white")
        axes = figure.add_axes((0, 0, 1, 1))
        draw_key(axes, ring)
        for number, (words, of_ranks) in enumerate(zip(titles, plans, strict=True)):
            draw_plans(axes, words, of_ranks, ring, KEY + number * panel + TITLE)
        axes.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
        axes.axis("off")
        save(figure, path)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    for name, nodes in NODES.items():
        draw(nodes, Path(__file__).parents[2] / name)
