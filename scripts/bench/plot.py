#!/usr/bin/env python
"""Draws the picture of a benchmark from its CSV.

    python scripts/bench/plot.py scripts/bench/results/cpu_loss.csv --output docs/loss-memory.svg

Which picture it is says the CSV's column "benchmark". Below it stand the date, the device, the
versions and the command, all from the CSV.
"""

import argparse
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from page import read_csv

MIB = 2**20
# Text stays text, and equal figures make equal files.
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "megatron_burst"}
COLORS = {"ring": "0.45", "burst": "#1667ad", "allgather": "#d1620a", "ulysses": "#8b3fb0"}
SHOWN = {  # of two nodes, beside the flat ring
    "burst auto": COLORS["burst"],
    "ring double": "#26803a",
    "allgather": COLORS["allgather"],
    "ulysses": COLORS["ulysses"],
}

type Rows = Sequence[Mapping[str, str]]


def loss(rows: Rows, figure: Figure) -> None:
    """Memory against tokens, by vocabulary and way."""
    axes = figure.subplots()
    rows = [row for row in rows if row["measured"] == "memory"]
    vocabularies = unique(rows, "vocabulary")
    for vocabulary in vocabularies:
        for way in unique(rows, "way"):
            line = [r for r in rows if (r["vocabulary"], r["way"]) == (vocabulary, way)]
            fused = way.startswith("chunked")
            axes.plot(
                [int(row["tokens"]) for row in line],
                [int(row["bytes"]) / MIB for row in line],
                label=f"{way}, vocabulary {int(vocabulary) // 1024}k",
                color=f"C{vocabularies.index(vocabulary)}",
                linestyle="-" if fused else "--",
                marker="o" if fused else "x",
                linewidth=2.4 if fused else 1.4,
            )
    tokens = [int(n) for n in unique(rows, "tokens")]
    powers_of_two(axes, [int(row["bytes"]) / MIB for row in rows], axes.yaxis, step=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
    axes.set_xlabel("tokens on a rank")
    axes.set_ylabel("memory of the LM head and loss")
    axes.set_title(
        f"Beside inputs, weight and gradients; bfloat16, hidden size {rows[0]['hidden']}"
    )
    axes.legend(fontsize="small")


def recompute(rows: Rows, figure: Figure) -> None:
    """Time of a step against what is stored."""
    axes = figure.subplots()
    kept = [row for row in rows if row["fraction"] != "none"]
    measured, predicted = ("stored_bytes", "median_s"), ("predicted_bytes", "predicted_s")
    for some, (stored, seconds), label, style in (
        (kept, measured, "every layer checkpointed, measured", "o-"),
        (kept, predicted, "predicted", "x--"),
        ([row for row in rows if row not in kept], measured, "no recompute", "s"),
    ):
        points = [(float(row[stored]) / MIB, float(row[seconds])) for row in some]
        axes.plot(*zip(*points, strict=True), style, label=label)
    for row in kept:
        axes.annotate(
            f"ρ = {row['fraction']}",
            (float(row["stored_bytes"]) / MIB, float(row["median_s"])),
            xytext=(0, -6),
            textcoords="offset points",
            rotation=60,
            horizontalalignment="right",
            verticalalignment="top",
        )
    powers_of_two(axes, [float(row["stored_bytes"]) / MIB for row in rows], axes.xaxis)
    columns = ("median_s", "predicted_s")
    times = [float(row[name]) for row in rows for name in columns if row[name]]
    axes.set_ylim(0.85 * min(times), 1.08 * max(times))
    axes.set_xlabel("what forward stores")
    axes.set_ylabel("seconds a step")
    axes.set_title("{layers} layers, {tokens} tokens, hidden size {hidden}".format(**rows[0]))
    axes.legend(fontsize="small")


def two_nodes(rows: Rows, figure: Figure) -> None:
    """Step over that of the flat ring against the rate of a NIC; of several tensors the first."""
    rows = [row for row in rows if row["phase"] == "step" and float(row["mbit"])]
    key = [rows[0][name] for name in ("tokens", "heads", "kv_heads")]
    rows = [row for row in rows if [row["tokens"], row["heads"], row["kv_heads"]] == key]
    rates = sorted(unique(rows, "mbit"), key=float)
    if len(rates) < 2:
        raise ValueError("no tensors were measured at several link rates; run it with --suite")
    axes = figure.subplots()
    axes.axhline(1, color=COLORS["ring"], label="ring flat")
    for name, color in SHOWN.items():
        line = {row["mbit"]: float(row["ratio"]) for row in rows if row["algorithm"] == name}
        if line:
            axes.plot([line[rate] for rate in rates], "o-", color=color, label=name)
    axes.set_xticks(range(len(rates)), ["no limit" if math.isinf(float(r)) else r for r in rates])
    axes.set_xlabel("Mbit/s between the two nodes, a rank")
    axes.set_ylabel("time of a step over the flat ring's")
    axes.set_title("{} tokens a rank, {} heads, {} KV heads".format(*key), fontsize="medium")
    axes.set_ylim(0)
    axes.legend(fontsize="small")


class Picture(NamedTuple):
    draw: Callable[[Rows, Figure], None]
    size: tuple[float, float]  # inches


PICTURES: Mapping[str, Picture] = {
    "loss": Picture(loss, (8, 4.9)),
    "recompute": Picture(recompute, (7, 4.5)),
    "two_nodes": Picture(two_nodes, (7, 4.5)),
}


def panels(figure: Figure, number: int) -> list[Axes]:
    """Return axes side by side that share their vertical axis."""
    return list(figure.subplots(1, number, sharey=True, squeeze=False)[0])


def shared_legend(figure: Figure) -> None:
    """Put one legend of all panels' lines at the right."""
    lines = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")


def powers_of_two(axes: Axes, mebibytes: Sequence[float], axis: Any, step: int = 1) -> None:
    """Make an axis logarithmic, with ticks at powers of two."""
    scale = axes.set_xscale if axis is axes.xaxis else axes.set_yscale
    scale("log", base=2)
    powers = range(int(math.log2(min(mebibytes))), math.ceil(math.log2(max(mebibytes))) + 1, step)
    ticks = [2**n for n in powers]
    axis.set_ticks(ticks, [f"{n:g} MiB" if n < 1024 else f"{n // 1024} GiB" for n in ticks])


def unique(rows: Iterable[Mapping[str, str]], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def origin_of(rows: Rows) -> str:
    """Say under a picture where its figures come from."""
    one = rows[0]
    parts = [one["date"], one["device"], f"torch {one['torch']}", f"Python {one['python']}"]
    return "\n".join([", ".join(parts), *textwrap.wrap(one["command"], 120)])


def draw(table: Path, path: Path) -> None:
    """Draw the picture of a CSV.

    Raises:
        ValueError: the CSV has no rows, or its benchmark no picture.
    """
    rows = read_csv(table)
    kind = rows[0].get("benchmark", "") if rows else ""
    if kind not in PICTURES:
        raise ValueError(f"{table}: pictures are made of {', '.join(PICTURES)}, not of '{kind}'")
    with rc_context(STYLE):
        figure = Figure(figsize=PICTURES[kind].size, layout="constrained")
        FigureCanvasAgg(figure)
        PICTURES[kind].draw(rows, figure)
        for axes in figure.axes:
            axes.grid(alpha=0.3)
        figure.text(0.01, -0.01, origin_of(rows), fontsize=6.5, color="0.4", va="top")
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata, bbox_inches="tight", dpi=120)


def main() -> None:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=about[0], epilog=about[2])
    parser.add_argument("table", type=Path, metavar="CSV")
    parser.add_argument("--output", type=Path, required=True, help="an .svg or .png")
    args = parser.parse_args()
    try:
        draw(args.table, args.output)
    except (ValueError, OSError) as error:
        parser.exit(1, f"plot: {error}\n")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
