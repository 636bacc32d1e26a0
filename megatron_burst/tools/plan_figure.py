"""Draws the plans of all ranks: which tiles are computed at each step, and what travels.

    python -m megatron_burst.tools.plan_figure --ranks 4 --output docs/plan.svg

A row is a rank, a column a step. Nothing is drawn that is not read from the plans.
"""

import argparse
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Polygon, Rectangle

from megatron_burst.layout import Interval, Layout, zigzag
from megatron_burst.mask import Mask, Relation
from megatron_burst.plan import Plan, Tile, Transfer, flat_kv_backward, flat_ring_forward

MOST_RANKS = 8
"""More ranks than this cannot be read at the width of a page."""
FORMATS = (".svg", ".png", ".pdf")

# One for each rank's keys; dark enough to be read as text, apart for the colour-blind, too.
_COLORS = ("#1667ad", "#d1620a", "#26803a", "#8b3fb0", "#b8860b", "#0a7f86", "#c02c5e", "#6b4a2b")
_NARROWEST = 7.6  # inches that the words of the key need
_GREY, _VISIBLE, _BAND = "#8a8f98", "#e9ebee", "#c9ced6"
# Inches: of a cell of the grid, of a score matrix in it, of the space left of the grid.
_COLUMN, _ROW, _MATRIX, _LEFT = 1.62, 1.32, 0.92, 0.85
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "megatron_burst",  # equal plans make equal files
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9.5,
}


class Piece(NamedTuple):
    """A part of a tile: one interval of query positions against one of key positions."""

    query: Interval
    key: Interval
    relation: Relation


def pieces(layout: Layout, tile: Tile) -> list[Piece]:
    """Cut a tile, which counts local rows, into the chunks of the sequence that it covers."""
    found = []
    for query_rows, query in _chunks(layout, tile.query_owner, tile.query_rows):
        for key_rows, key in _chunks(layout, tile.key_owner, tile.key_rows):
            relation = tile.relation
            if relation is Relation.CAUSAL and key_rows != query_rows:
                # Off the diagonal of a causal square; tile rows and columns start together.
                below = key_rows.start < query_rows.start
                relation = Relation.FULL if below else Relation.EMPTY
            if relation is not Relation.EMPTY:
                found.append(Piece(query, key, relation))
    return found


def _chunks(layout: Layout, rank: int, rows: Interval) -> list[tuple[Interval, Interval]]:
    """The (local rows, positions) of those intervals of a rank that lie in `rows`."""
    pairs = zip(layout.local_rows(rank), layout.shards[rank], strict=True)
    return [(r, p) for r, p in pairs if rows.start <= r.start and r.stop <= rows.stop]


def draw(ranks: int, mask: Mask, path: Path) -> None:
    """Write the forward and backward plans of `ranks` ranks to `path`, in its suffix's format.

    Raises:
        ValueError: the number of ranks or the suffix is not one that can be drawn.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: between 2 and {MOST_RANKS} can be drawn")
    if path.suffix not in FORMATS:
        raise ValueError(f"--output {path}: the name must end in {', '.join(FORMATS)}")
    layout = zigzag(4 * ranks, ranks)  # two tokens a chunk: the fewest that have a diagonal
    forward = [flat_ring_forward(layout, mask, rank) for rank in range(ranks)]
    backward = [flat_kv_backward(layout, mask, rank) for rank in range(ranks)]
    with rc_context(_STYLE):
        width, panel = max(_LEFT + (ranks + 1) * _COLUMN, _NARROWEST), ranks * _ROW + 0.75
        figure = Figure(figsize=(width, 2 * panel + 2.15), dpi=120, facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(2 * panel + 2.15, 0), aspect="equal")
        axes.axis("off")
        _draw_key(axes, layout, mask)
        _Panel(axes, layout, mask, top=2.15).draw("Forward", forward)
        _Panel(axes, layout, mask, top=2.15 + panel).draw("Backward", backward)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


class _Panel:
    """One grid of ranks and steps; x to the right and y down, in inches."""

    def __init__(self, axes: Axes, layout: Layout, mask: Mask, top: float) -> None:
        self._axes, self._layout, self._mask = axes, layout, mask
        self._top = top + 0.72

    def draw(self, title: str, plans: Sequence[Plan]) -> None:
        self._axes.text(0.12, self._top - 0.46, title, fontsize=13, fontweight="bold")
        for number in range(max(len(plan.steps) for plan in plans)):
            x, _ = self._corner(0, number)
            self._axes.text(x + _MATRIX / 2, self._top - 0.3, f"step {number}", ha="center")
        for plan in plans:
            y = self._corner(plan.rank, 0)[1] + _MATRIX / 2
            self._axes.text(0.12, y, f"rank {plan.rank}", va="center", fontweight="bold")
            for number, step in enumerate(plan.steps):
                self._cell(plan.rank, number, step.tiles)
                for transfer in step.sends:
                    self._arrow(plan.rank, number, transfer)
                if not step.tiles:
                    self._homecoming(plan.rank, number, step.receives)

    def _corner(self, rank: int, step: int) -> tuple[float, float]:
        return _LEFT + step * _COLUMN, self._top + rank * _ROW

    def _cell(self, rank: int, step: int, tiles: Sequence[Tile]) -> None:
        if not tiles:
            return
        x, y = self._corner(rank, step)
        _matrix(self._axes, self._layout, self._mask, rank, tiles, (x, y), _MATRIX)
        for owner in {tile.key_owner for tile in tiles}:
            whose = "own keys" if owner == rank else f"keys of rank {owner}"
            self._label(x, y - 0.05, whose, owner, va="bottom")

    def _homecoming(self, rank: int, step: int, receives: Sequence[Transfer]) -> None:
        x, y = self._corner(rank, step)
        for transfer in receives:
            owner = transfer.item.owner
            box = Rectangle((x, y + 0.23), _MATRIX, 0.46, fill=False, edgecolor=_COLORS[owner])
            self._axes.add_patch(box)
            self._label(x, y + _MATRIX / 2, f"dK, dV of\nrank {owner} whole", owner, va="center")

    def _label(self, x: float, y: float, text: str, owner: int, va: str) -> None:
        self._axes.text(
            x + _MATRIX / 2, y, text, color=_COLORS[owner], ha="center", va=va, fontsize=8.5
        )

    def _arrow(self, rank: int, step: int, transfer: Transfer) -> None:
        """What leaves at `step`: a block is there at the next, a gradient is added in this one."""
        gradient = transfer.item.kind.is_gradient
        column = step - 1 if gradient else step  # a gradient that leaves was made one step before
        down = transfer.peer - rank
        if abs(down) == 1:
            self._one_arrow(rank, column, rank + down, transfer)
            return
        # Around the end of the ring: out of one edge of the grid and in at the other.
        self._one_arrow(rank, column, rank + 1, transfer, part=(0.0, 0.5))
        self._one_arrow(transfer.peer - 1, column, transfer.peer, transfer, part=(0.5, 1.0))

    def _one_arrow(
        self,
        rank: int,
        column: int,
        peer: int,
        transfer: Transfer,
        part: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        gradient = transfer.item.kind.is_gradient
        (x0, y0), (x1, y1) = self._corner(rank, column), self._corner(peer, column + 1)
        shift = 0.14 if gradient else -0.14
        x0, y0, x1, y1 = x0 + _MATRIX, y0 + 0.5 + shift, x1, y1 + 0.4 + shift
        begin, end = ((x0 + f * (x1 - x0), y0 + f * (y1 - y0)) for f in part)
        self._axes.add_patch(
            FancyArrowPatch(
                begin,
                end,
                arrowstyle="-|>" if part[1] == 1.0 else "-",
                mutation_scale=11,
                shrinkA=2,
                shrinkB=2,
                linewidth=1.5,
                linestyle=(0, (3.2, 1.8)) if gradient else "-",
                color=_COLORS[transfer.item.owner],
            )
        )


def _matrix(
    axes: Axes,
    layout: Layout,
    mask: Mask,
    rank: int | None,
    tiles: Sequence[Tile],
    corner: tuple[float, float],
    size: float,
) -> None:
    """The score matrix at `corner`: what the mask shows, the rank's queries, the tiles computed."""
    (x, y), tokens = corner, layout.ranks * layout.local_tokens
    unit = size / tokens

    def at(key: int, query: int) -> tuple[float, float]:
        return x + key * unit, y + query * unit

    def fill(query: Interval, key: Interval, triangle: bool, color: str) -> None:
        corners = [(key.start, query.start), (key.start, query.stop), (key.stop, query.stop)]
        corners += [] if triangle else [(key.stop, query.start)]
        axes.add_patch(Polygon([at(*c) for c in corners], facecolor=color, linewidth=0))

    everything = Interval(0, tokens)
    fill(everything, everything, mask.is_causal, _VISIBLE)
    for query in layout.shards[rank] if rank is not None else ():
        seen = Interval(0, query.start) if mask.is_causal else everything
        fill(query, seen, False, _BAND)
        if mask.is_causal:
            fill(query, query, True, _BAND)
    for tile in tiles:
        for piece in pieces(layout, tile):
            triangle = piece.relation is Relation.CAUSAL
            fill(piece.query, piece.key, triangle, _COLORS[tile.key_owner])
    for line in range(1, 2 * layout.ranks):
        cut = line * size / (2 * layout.ranks)
        across = ((x, x + size, nan, x + cut, x + cut), (y + cut, y + cut, nan, y, y + size))
        axes.plot(*across, color="white", linewidth=0.5, solid_capstyle="butt")
    axes.add_patch(Rectangle((x, y), size, size, fill=False, edgecolor=_GREY, linewidth=0.8))


def _draw_key(axes: Axes, layout: Layout, mask: Mask) -> None:
    """How to read the figure: one large score matrix with its axes, and the signs in words."""
    size, x, y, chunks = 1.35, 0.62, 0.5, 2 * layout.ranks
    _matrix(axes, layout, mask, 0, (), (x, y), size)
    holder = {chunk: rank for rank, shard in enumerate(layout.shards) for chunk in shard}
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
    axes.text(2.7, 0.3, f"{layout.ranks} ranks, one ring, zigzag", fontsize=13, fontweight="bold")
    lines = (
        f"Each square is the whole score matrix, cut into {chunks} x {chunks} chunks.",
        f"Rank r holds the chunks r and {chunks - 1} - r of the sequence.",
    )
    for row, line in enumerate(lines):
        axes.text(2.7, 0.6 + 0.23 * row, line)
    signs = (
        (_VISIBLE, "what the causal mask lets through" if mask.is_causal else "the scores"),
        (_BAND, "what a rank's own queries see; here, above, rank 0's"),
        (_COLORS[1], "computed in this step, in the colour of the keys' owner"),
    )
    for row, (color, words) in enumerate(signs):
        top = 1.07 + 0.23 * row
        axes.add_patch(Rectangle((2.7, top - 0.11), 0.24, 0.14, facecolor=color))
        axes.text(3.05, top, words)
    axes.add_patch(FancyArrowPatch((2.7, 1.72), (2.98, 1.72), arrowstyle="-|>", mutation_scale=9))
    axes.text(3.05, 1.76, "K and V travel")
    dashed = (0, (3.2, 1.8))
    axes.add_patch(
        FancyArrowPatch(
            (4.6, 1.72), (4.95, 1.72), arrowstyle="-|>", mutation_scale=9, linestyle=dashed
        )
    )
    axes.text(5.02, 1.76, "the sum of their gradients follows")


def main(argv: list[str] | None = None) -> None:
    """Run the command; SystemExit with the reason where the figure cannot be drawn."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.plan_figure", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--output", type=Path, required=True, help=f"ends in {', '.join(FORMATS)}")
    args = parser.parse_args(argv)
    try:
        draw(args.ranks, Mask.causal() if args.mask == "causal" else Mask.full(), args.output)
    except (ValueError, OSError) as error:
        parser.exit(1, f"plan_figure: {error}\n")


if __name__ == "__main__":
    main()
