"""Draws what ranks did in a traced training step: its calls, and a forward and a backward close."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_burst.tools.exposure import CallTrace
from megatron_burst.tools.picture import save
from megatron_burst.transport.chrome_trace import RECEIVE
from megatron_burst.transport.trace import Activity

MOST_RANKS = 8
"""More ranks than this cannot be read at the width of a page."""

_WAIT, _SUM, _POST = "#ffb3ad", "#8c8c8c", "#111111"
_CALLS = {"forward": "#9ecae1", "backward": "#a1d99b", "head exchange": "#cbc3e6"}
# One for each rank's blocks, none of them red, which is waiting.
_OWNERS = ("C0", "C1", "C2", "C4", "C5", "C8", "C9", "#17365d")
_MILLISECONDS = 1e3


def draw_timeline(calls: Sequence[CallTrace], training_step: int, path: Path) -> None:
    """Write a picture of the ring that the first rank is in; the suffix of `path` is its format.

    Args:
        calls: of all ranks.
        training_step: which step is drawn.
        path: where to.
    """
    calls = [c for c in calls if c.call.arguments["training_step"] == training_step]
    ring = _ring(calls)[:MOST_RANKS]
    calls = [call for call in calls if call.rank in ring]
    close = [name for name in ("forward", "backward") if any(c.name == name for c in calls)]
    height = 1.3 + (1 + len(close)) * (0.9 + 0.42 * len(ring))
    figure = Figure(figsize=(11, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    whole, *panels = figure.subplots(1 + len(close), squeeze=False)[:, 0]
    _draw_step(whole, calls, ring)
    whole.set_title(f"attention in training step {training_step}", loc="left")
    for axes, name in zip(panels, close, strict=True):
        # The last forward and the first backward are those of one layer.
        number = -1 if name == "forward" else 0
        parts = {r: [c for c in calls if c.rank == r and c.name == name][number] for r in ring}
        _draw_call(axes, parts)
        axes.set_title(f"one {name} of one layer", loc="left")
    panels[-1].set_xlabel("time (ms)")
    _legend(figure, calls, ring)
    save(figure, path)


def _ring(calls: Sequence[CallTrace]) -> list[int]:
    """The ranks of the first rank's ring, or of its all-to-all where it has no ring."""
    first = [call for call in calls if call.rank == 0]
    rings = [call for call in first if call.name in ("forward", "backward")] or first
    return list(rings[0].call.arguments["ranks"])


def _draw_step(axes: Axes, calls: Sequence[CallTrace], ring: Sequence[int]) -> None:
    zero = min(call.call.start for call in calls)
    for call in calls:
        row = ring.index(call.rank)
        bar = (call.call.start - zero, call.call.seconds)
        _bars(axes, [bar], (row - 0.4, 0.8), _CALLS[call.name])
        waits = [(e.start - zero, e.seconds) for e in call.events[Activity.WAIT]]
        _bars(axes, waits, (row - 0.4, 0.8), _WAIT)
    _rows(axes, ring)


def _draw_call(axes: Axes, parts: dict[int, CallTrace]) -> None:
    zero = min(part.call.start for part in parts.values())
    for row, part in enumerate(parts.values()):
        for event in part.events[Activity.TILE]:
            owner = _visitor(event.arguments, part.plan_rank)
            bar = (event.start - zero, event.seconds)
            _bars(axes, [bar], (row - 0.42, 0.56), _of(owner), edge="white")
        for activity, color in ((Activity.SUM, _SUM), (Activity.POST, _POST)):
            spans = [(e.start - zero, e.seconds) for e in part.events[activity]]
            _bars(axes, spans, (row - 0.42, 0.56), color)
        waits = [(e.start - zero, e.seconds) for e in part.events[Activity.WAIT]]
        _bars(axes, waits, (row - 0.42, 0.56), _WAIT)
        _draw_messages(axes, part, zero, row)
    _rows(axes, list(parts))


def _draw_messages(axes: Axes, part: CallTrace, zero: float, row: int) -> None:
    """Draw what is on its way to a rank below its tiles, as many lines as travel at once."""
    ends: list[float] = []
    for event in sorted(part.events[RECEIVE], key=lambda e: e.start):
        line = next((i for i, end in enumerate(ends) if end <= event.start), len(ends))
        ends[line : line + 1] = [event.stop]
        where = (row + 0.17 + 0.09 * (line % 3), 0.06)
        _bars(axes, [(event.start - zero, event.seconds)], where, _of(event.arguments["owner"]))


def _visitor(about: object, plan_rank: int) -> int:
    """Whose block visits in a tile: the owner, of queries or keys, who is not the rank itself."""
    assert isinstance(about, dict)
    queries, keys = int(about["queries_of"]), int(about["keys_of"])
    return queries if keys == plan_rank else keys


def _of(owner: int) -> str:
    return _OWNERS[owner % len(_OWNERS)]


def _bars(
    axes: Axes,
    spans: Sequence[tuple[float, float]],
    rows: tuple[float, float],
    color: str,
    *,
    edge: str = "none",
) -> None:
    scaled = [(start * _MILLISECONDS, length * _MILLISECONDS) for start, length in spans]
    if scaled:
        axes.broken_barh(scaled, rows, facecolors=color, edgecolors=edge, linewidth=0.4)


def _rows(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.margins(x=0.005)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(figure: Figure, calls: Sequence[CallTrace], ring: Sequence[int]) -> None:
    named = [name for name in _CALLS if any(call.name == name for call in calls)]
    handles = [Patch(color=_CALLS[name], label=name) for name in named]
    handles += [Patch(color=_WAIT, label="waiting for messages")]
    handles += [Patch(color=_SUM, label="sums"), Patch(color=_POST, label="posting")]
    handles += [
        Patch(color=_of(owner), label=f"tile with the block of ring rank {owner}")
        for owner in range(len(ring))
    ]
    lines = "thin lines: blocks and gradients on their way, from posting until awaited"
    figure.legend(
        handles=handles,
        title=lines,
        title_fontsize=9,
        loc="outside lower center",
        ncols=3,
        fontsize=9,
        frameon=False,
    )
