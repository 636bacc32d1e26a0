"""Draws the plans of all ranks: which tiles are computed at each step, and what is sent.

    python scripts/docs/plan_figure.py --ranks-per-node 4 --output docs/plan.svg
    python scripts/docs/plan_figure.py --nodes 2 --ranks-per-node 2 \\
        --output docs/plan-double.svg

A row is a rank, a column a step. Nothing is drawn that is not read from the plans.
"""

import argparse
from collections.abc import Iterable, Sequence
from itertools import batched
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.path
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle
from picture import save

from megatron_burst.config import GradientReturn
from megatron_burst.plans.layout import Interval, Layout, zigzag
from megatron_burst.plans.mask import Band, Mask
from megatron_burst.plans.plan import Channel, Plan, Send, Tile
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid

MOST_RANKS = 8
"""More ranks than this cannot be read at the width of a page."""
FORMATS = (".svg", ".png", ".pdf")

# One for each rank's blocks; dark enough to be read as text, apart for the colour-blind, too.
_COLORS = ("#1667ad", "#d1620a", "#26803a", "#8b3fb0", "#b8860b", "#0a7f86", "#c02c5e", "#6b4a2b")
_NARROWEST = 8.9  # inches that the words of the key need
_GREY, _VISIBLE, _BAND = "#8a8f98", "#e9ebee", "#c9ced6"
# Inches: of a cell of the grid, of a score matrix in it, of the space left of the grid, of a title,
# of the space between nodes, of the key.
_COLUMN, _ROW, _MATRIX, _LEFT, _TITLE, _NODE, _KEY = 1.62, 1.32, 0.92, 0.85, 0.75, 0.42, 2.15
_DASHES: Any = (0, (3.2, 1.8))  # of gradients
_BETWEEN: dict[Channel, float] = {Channel.READ_BETWEEN: 2.8, Channel.GRADIENT_BETWEEN: 2.8}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
}


class Piece(NamedTuple):
    """A part of a tile: one interval of query positions against one of key positions."""

    query: Interval
    key: Interval
    band: Band


def pieces(layout: Layout, tile: Tile) -> list[Piece]:
    """Cut a tile, which counts local rows, into the chunks of the sequence that it covers."""
    found = []
    for query_offset, query in _chunks(layout, tile.query_owner, tile.query_rows):
        for key_offset, key in _chunks(layout, tile.key_owner, tile.key_rows):
            band = tile.band
            if band == Band.CAUSAL and key_offset > query_offset:
                continue  # above the diagonal of a causal square
            if band == Band.CAUSAL and key_offset < query_offset:
                band = Band.FULL
            found.append(Piece(query, key, band))
    return found


def _chunks(layout: Layout, rank: int, rows: Interval) -> list[tuple[int, Interval]]:
    """The positions that `rows` of a rank hold, interval by interval, each with its first row."""
    found = []
    for local, positions in zip(layout.local_rows(rank), layout.shards[rank], strict=True):
        start, stop = max(rows.start, local.start), min(rows.stop, local.stop)
        if start < stop:
            shift = positions.start - local.start
            found.append((start - rows.start, Interval(start + shift, stop + shift)))
    return found


def columns(step: int, send: Send) -> tuple[int, int]:
    """Return from which column to which a message goes that is posted in `step`.

    A block is there for the step after the one it lands in; a gradient was made before it leaves,
    and is added at the end of the step it lands in.
    """
    return (step - 1, send.lands) if send.item.kind.is_gradient else (step, send.lands + 1)


def draw(nodes: int, ranks_per_node: int, path: Path) -> None:
    """Write the forward and the backward of a causal kv ring to `path`, in its suffix's format.

    Raises:
        ValueError: the number of ranks or the suffix is not one that can be drawn.
    """
    ranks = nodes * ranks_per_node
    if nodes < 1 or not 2 <= ranks <= MOST_RANKS:
        raise ValueError(
            f"--nodes {nodes} x --ranks-per-node {ranks_per_node}: between 2 and {MOST_RANKS} "
            "ranks can be drawn"
        )
    if path.suffix not in FORMATS:
        raise ValueError(f"--output {path}: the name must end in {', '.join(FORMATS)}")
    layout = zigzag(4 * ranks, ranks)  # two tokens a chunk: the fewest that have a diagonal
    grid = Grid(tuple(batched(range(ranks), ranks_per_node)))
    ring = Ring(Tiling(layout, Mask.causal()), grid, gradient_return=GradientReturn.HOME)
    figure = _figure(ring, layout)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(_STYLE):
        save(figure, path)


def _figure(ring: Ring, layout: Layout) -> Figure:
    """The key, the forward and the backward."""
    grid = ring.grid
    forward = [ring.forward(rank) for rank in range(grid.ranks)]
    backward = [ring.backward(rank) for rank in range(grid.ranks)]
    steps = max(len(plan.steps) for plan in backward)
    with rc_context(_STYLE):
        width = max(_LEFT + steps * _COLUMN, _NARROWEST)
        panel = grid.ranks * _ROW + (grid.nodes - 1) * _NODE + _TITLE
        figure = Figure(figsize=(width, 2 * panel + _KEY), dpi=120, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(2 * panel + _KEY, 0), aspect="equal")
        axes.axis("off")
        _draw_key(axes, ring, layout)
        _Panel(axes, layout, grid, top=_KEY).draw("Forward: K and V circulate", forward)
        title = "Backward: K and V circulate, dK and dV are returned to their owner"
        title += ", summed once a node" if grid.nodes > 1 else ""
        _Panel(axes, layout, grid, top=_KEY + panel).draw(title, backward)
    return figure


class _Panel:
    """One grid of ranks and steps; x to the right and y down, in inches."""

    def __init__(self, axes: Axes, layout: Layout, grid: Grid, top: float) -> None:
        self._axes, self._layout, self._grid, self._top = axes, layout, grid, top + 0.72

    def draw(self, title: str, plans: Sequence[Plan]) -> None:
        self._axes.text(0.12, self._top - 0.53, title, fontsize=13, fontweight="bold")
        for number in range(max(len(plan.steps) for plan in plans)):
            x = _LEFT + number * _COLUMN
            self._axes.text(x + _MATRIX / 2, self._top - 0.3, f"step {number}", ha="center")
        for plan in plans:
            self._row_name(plan.rank)
            for number, step in enumerate(plan.steps):
                self._cell(plan.rank, number, step.tiles)
                for send in step.sends:
                    self._message(plan.rank, number, send)
            if any(send.item.kind.is_gradient for send in plan.sends):
                x, y = self._corner(plan.rank, len(plan.steps) - 1)
                self._label(x, y + _MATRIX + 0.04, "dK and dV whole", plan.rank, va="top")

    def _corner(self, rank: int, step: int) -> tuple[float, float]:
        node, local = self._grid.coordinates(rank)
        row = node * self._grid.ranks_per_node + local
        return _LEFT + step * _COLUMN, self._top + row * _ROW + node * _NODE

    def _row_name(self, rank: int) -> None:
        y = self._corner(rank, 0)[1]
        self._axes.text(0.12, y + _MATRIX / 2, f"rank {rank}", va="center", fontweight="bold")
        node, local = self._grid.coordinates(rank)
        if self._grid.nodes > 1 and local == 0:
            self._axes.text(0.12, y - 0.05, f"node {node}", va="bottom", color=_GREY)

    def _cell(self, rank: int, step: int, tiles: Sequence[Tile]) -> None:
        if not tiles:
            return
        x, y = self._corner(rank, step)
        band = _seen(self._layout, rank)
        colored = [(tile, _COLORS[tile.key_owner]) for tile in tiles]
        _matrix(self._axes, self._layout, band, colored, (x, y), _MATRIX)
        for owner in {tile.key_owner for tile in tiles}:
            words = "own keys" if owner == rank else f"keys of rank {owner}"
            self._label(x, y - 0.05, words, owner, "bottom")

    def _label(self, x: float, y: float, text: str, owner: int, va: str) -> None:
        self._axes.text(
            x + _MATRIX / 2, y, text, color=_COLORS[owner], ha="center", va=va, fontsize=8.5
        )

    def _message(self, rank: int, step: int, send: Send) -> None:
        """Draw a message from where it leaves to where it is used."""
        first, last = columns(step, send)
        shift = 0.14 if send.item.kind.is_gradient else -0.14
        (x0, y0), (x1, y1) = self._corner(rank, first), self._corner(send.peer, last)
        begin, end = (x0 + _MATRIX + 0.03, y0 + 0.5 + shift), (x1 - 0.03, y1 + 0.4 + shift)
        if last - first > 1:  # below its row until its last step is over, past the other cells
            lane = y0 + _MATRIX + (0.16 if shift > 0 else 0.08)
            ways = ((begin[0] + 0.1, lane), (end[0] - (_COLUMN - _MATRIX) + 0.1, lane))
            self._line(send, (begin, *ways, end))
        elif self._goes_around(rank, send.peer):
            # Out of one edge of its node's rows and in at the other.
            middle = (begin[0] + end[0]) / 2
            below, above = y0 + 0.45 + _ROW / 2 + shift, y1 + 0.45 - _ROW / 2 + shift
            self._line(send, (begin, (middle, below)), arrow="-")
            self._line(send, ((middle, above), end))
        else:
            self._line(send, (begin, end))

    def _goes_around(self, rank: int, peer: int) -> bool:
        (node, local), (other, place) = self._grid.coordinates(rank), self._grid.coordinates(peer)
        return node == other and place == 0 and local == self._grid.ranks_per_node - 1 > 0

    def _line(self, send: Send, points: Iterable[tuple[float, float]], arrow: str = "-|>") -> None:
        self._axes.add_patch(
            FancyArrowPatch(
                path=matplotlib.path.Path(list(points)),
                arrowstyle=arrow,
                mutation_scale=11,
                linewidth=_BETWEEN.get(send.channel, 1.5),
                linestyle=_DASHES if send.item.kind.is_gradient else "-",
                color=_COLORS[send.item.owner],
                fill=arrow != "-",
            )
        )


def _seen(layout: Layout, rank: int) -> list[Piece]:
    """The scores of a rank's queries."""
    found = []
    for positions in layout.shards[rank]:
        own = Interval(positions.start, positions.stop)
        before = Piece(own, Interval(0, own.start), Band.FULL)
        found += [Piece(own, own, Band.CAUSAL), before]
    return found


def _matrix(
    axes: Axes,
    layout: Layout,
    band: Sequence[Piece],
    tiles: Sequence[tuple[Tile, str]],
    corner: tuple[float, float],
    size: float,
) -> None:
    """The score matrix at `corner`: what the mask shows, the rank's part, the tiles computed."""
    (x, y), tokens = corner, layout.ranks * layout.local_tokens
    unit = size / tokens

    def at(key: int, query: int) -> tuple[float, float]:
        return x + key * unit, y + query * unit

    def fill(piece: Piece, color: str) -> None:
        query, key = piece.query, piece.key
        corners = [(key.start, query.start), (key.start, query.stop), (key.stop, query.stop)]
        corners += [] if piece.band == Band.CAUSAL else [(key.stop, query.start)]
        axes.add_patch(Polygon([at(*c) for c in corners], facecolor=color, linewidth=0))

    everything = Interval(0, tokens)
    fill(Piece(everything, everything, Band.CAUSAL), _VISIBLE)
    for piece in band:
        fill(piece, _BAND)
    for tile, color in tiles:
        for piece in pieces(layout, tile):
            fill(piece, color)
    for line in range(1, 2 * layout.ranks):
        cut = line * size / (2 * layout.ranks)
        across = ((x, x + size, nan, x + cut, x + cut), (y + cut, y + cut, nan, y, y + size))
        axes.plot(*across, color="white", linewidth=0.5, solid_capstyle="butt")
    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=_GREY, linewidth=0.8))


def _draw_key(axes: Axes, ring: Ring, layout: Layout) -> None:
    """How to read the figure: one large score matrix with its axes, and the signs in words."""
    size, x, y, chunks = 1.35, 0.62, 0.5, 2 * layout.ranks
    _matrix(axes, layout, _seen(layout, 0), (), (x, y), size)
    holder = {chunk.start: rank for rank, shard in enumerate(layout.shards) for chunk in shard}
    for index, chunk in enumerate(sorted(holder)):
        middle, rank = (index + 0.5) * size / chunks, holder[chunk]
        style: dict[str, Any] = {
            "color": _COLORS[rank],
            "ha": "center",
            "va": "center",
            "fontsize": 8,
        }
        axes.text(x + middle, y - 0.1, str(rank), **style)
        axes.text(x - 0.1, y + middle, str(rank), **style)
    axes.text(x + size / 2, y - 0.22, "keys, by the rank that holds them", ha="center", fontsize=8)
    axes.text(x - 0.22, y + size / 2, "queries", ha="right", va="center", rotation=90, fontsize=8)
    title = f"{layout.ranks} ranks, {ring.grid}, zigzag"
    axes.text(2.7, 0.3, title, fontsize=13, fontweight="bold")
    lines = (
        f"Each square is the whole score matrix, cut into {chunks} x {chunks} chunks.",
        f"Rank r holds the chunks r and {chunks - 1} - r of the sequence.",
    )
    for row, line in enumerate(lines):
        axes.text(2.7, 0.6 + 0.23 * row, line)
    signs = (
        (_VISIBLE, "what the causal mask lets through"),
        (_BAND, "what a rank's own queries see (above, rank 0's)"),
        (_COLORS[1], "computed in this step, in the colour of the owner of the keys"),
    )
    for row, (color, words) in enumerate(signs):
        top = 1.07 + 0.23 * row
        axes.add_patch(Rectangle((2.7, top - 0.11), 0.24, 0.14, facecolor=color))
        axes.text(3.05, top, words)
    arrows: list[tuple[float, str, dict[str, Any]]] = [
        (2.7, "K and V", {}),
        (4.15, "gradients", {"linestyle": _DASHES}),
    ]
    if ring.grid.nodes > 1:
        thick = _BETWEEN[Channel.READ_BETWEEN]
        arrows.append((5.4, "between nodes", {"linewidth": thick}))
    for left, words, sign in arrows:
        ends = (left, 1.72), (left + 0.3, 1.72)
        axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=9, **sign))
        axes.text(left + 0.36, 1.76, words)


def main(argv: list[str] | None = None) -> None:
    """Run the command; SystemExit with the reason where the figure cannot be drawn."""
    parser = argparse.ArgumentParser(
        prog="python scripts/docs/plan_figure.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="default: %(default)s")
    parser.add_argument(
        "--ranks-per-node", type=int, default=4, metavar="L", help="default: %(default)s"
    )
    parser.add_argument("--output", type=Path, required=True, help=f"ends in {', '.join(FORMATS)}")
    args = parser.parse_args(argv)
    try:
        draw(args.nodes, args.ranks_per_node, args.output)
    except (ValueError, OSError) as error:
        parser.exit(1, f"plan_figure: {error}\n")


if __name__ == "__main__":
    main()
