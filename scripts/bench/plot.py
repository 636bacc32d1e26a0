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
LINES: Mapping[str, tuple[str, str]] = {  # color and style of an algorithm
    "ring flat": (COLORS["ring"], "-"),
    "ring double": (COLORS["ring"], "--"),
    "ring hybrid": (COLORS["ring"], ":"),
    "burst query flat": ("#26803a", "-"),
    "burst query double": ("#26803a", "--"),
    "burst kv flat": ("#c02c5e", "-"),
    "burst kv double": ("#c02c5e", "--"),
    "burst hybrid": (COLORS["burst"], ":"),
    "burst auto": (COLORS["burst"], "-"),
    "allgather": (COLORS["allgather"], "-"),
    "ulysses": (COLORS["ulysses"], "-"),
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
    """Step over that of the flat ring against the rate of a card; a panel for each share of KV."""
    rows = [row for row in rows if row["phase"] == "step" and float(row["mbit"])]
    groups = ("tokens", "heads", "kv_heads")
    several = [
        key
        for key in dict.fromkeys(tuple(row[name] for name in groups) for row in rows)
        if len(unique((r for r in rows if tuple(r[name] for name in groups) == key), "mbit")) > 1
    ]
    if not several:
        raise ValueError("no tensors were measured at several link rates; run it with --suite")
    for axes, key in zip(panels(figure, len(several)), several, strict=True):
        some = [row for row in rows if tuple(row[name] for name in groups) == key]
        rates = sorted(unique(some, "mbit"), key=float)
        for name in unique(some, "algorithm"):
            line = {row["mbit"]: float(row["ratio"]) for row in some if row["algorithm"] == name}
            color, style = LINES[name]
            width = 2.6 if name == "burst auto" else 1.5
            heights = [line[rate] for rate in rates]
            axes.plot(heights, style, color=color, label=name, marker="o", ms=3.5, lw=width)
        alone = {
            r["mbit"]: float(r["kernels_share"]) for r in some if r["algorithm"] == "ring flat"
        }
        heights, label = [alone[rate] for rate in rates], "kernels of ring flat"
        axes.plot(heights, "-.", color="0.75", label=label, marker="o", ms=3.5, lw=1.5)
        names = ["no limit" if math.isinf(float(rate)) else rate for rate in rates]
        axes.set_xticks(range(len(rates)), names)
        axes.set_xlabel("Mbit/s of a rank's card to the other node")
        axes.set_title("{} tokens a rank, {} heads, {} KV heads".format(*key), fontsize="medium")
    figure.axes[0].set_ylabel("time of a step over the flat ring's")
    shared_legend(figure)


def attention(rows: Rows, figure: Figure) -> None:
    """Step over that of the flat ring, by mask, algorithm and share of KV, on the most ranks."""
    most = max(int(row["ranks"]) for row in rows)
    longest = max(int(row["tokens"]) for row in rows)
    rows = [
        row
        for row in rows
        if (row["phase"], int(row["ranks"]), int(row["tokens"])) == ("step", most, longest)
    ]
    names = unique(rows, "algorithm")[::-1]
    heads = list(dict.fromkeys((row["heads"], row["kv_heads"]) for row in rows))
    masks = unique(rows, "mask")
    for axes, mask in zip(panels(figure, len(masks)), masks, strict=True):
        for index, (query, kv) in enumerate(heads):
            points = [
                (float(row["ratio"]), names.index(row["algorithm"]))
                for row in rows
                if (row["mask"], row["heads"], row["kv_heads"]) == (mask, query, kv)
            ]
            label = f"{query} heads, {kv} KV heads"
            axes.plot(*zip(*points, strict=True), "osD^"[index % 4], label=label, alpha=0.8)
        axes.axvline(1, color="0.4", linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(mask, fontsize="medium")
    figure.supxlabel(
        f"time of a step over the flat ring's: {most} ranks, {longest} tokens a rank",
        fontsize="medium",
    )
    shared_legend(figure)


def end_to_end(rows: Rows, figure: Figure) -> None:
    """Time of a step and peak memory, case by case."""
    time, memory = panels(figure, 2)
    cases = [row["case"] for row in rows]
    colors = [COLORS.get(row["variant"].split()[0], "0.75") for row in rows]
    middle, least, largest = (
        [1e3 * float(row[name]) for row in rows] for name in ("median_s", "least_s", "largest_s")
    )
    spread = [
        [m - n for m, n in zip(middle, least, strict=True)],
        [n - m for m, n in zip(middle, largest, strict=True)],
    ]
    time.barh(cases, middle, xerr=spread, color=colors, capsize=3)
    time.invert_yaxis()
    time.set_xlabel("ms a step, least to most of the rounds")
    memory.barh(cases, [float(row["peak_memory_bytes"]) / 2**30 for row in rows], color=colors)
    memory.set_xlabel("peak memory, GiB")


class Picture(NamedTuple):
    draw: Callable[[Rows, Figure], None]
    size: tuple[float, float]  # inches


PICTURES: Mapping[str, Picture] = {
    "loss": Picture(loss, (8, 4.9)),
    "recompute": Picture(recompute, (7, 4.5)),
    "two_nodes": Picture(two_nodes, (10, 4.9)),
    "attention": Picture(attention, (12, 4.6)),
    "end_to_end": Picture(end_to_end, (10, 4.6)),
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
