#!/usr/bin/env python
"""Draws the picture of a benchmark from its CSV.

    python scripts/docs/plot.py scripts/bench/results/cpu_loss.csv --output docs/loss-memory.svg

Which picture it is says the CSV's column "benchmark". Below it stand the date, the device, the
versions and the command, all from the CSV.
"""

import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pages import parser, read_csv

MIB = 2**20
# Text stays text, and equal figures make equal files.
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "megatron_burst"}
LIMITED = {"chunked, 512 MiB": "in chunks, --lm-head-memory-mb 512"}  # of a loss
SHOWN = {  # of two nodes, beside the flat ring
    "burst auto": "#1667ad",
    "ring double": "#26803a",
    "allgather": "#d1620a",
    "ulysses": "#8b3fb0",
}

type Rows = Sequence[Mapping[str, str]]


def save(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the suffix of `path` names, without a date in it."""
    with rc_context(STYLE):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, bbox_inches="tight")


def loss(rows: Rows, axes: Axes) -> None:
    """Memory against tokens, by way, for one vocabulary."""
    rows = [row for row in rows if row["measured"] == "memory"]
    vocabulary = sorted(unique(rows, "vocabulary"), key=int)[len(unique(rows, "vocabulary")) // 2]
    rows = [row for row in rows if row["vocabulary"] == vocabulary]
    for way in unique(rows, "way"):
        line = [(int(row["tokens"]), int(row["bytes"]) / MIB) for row in rows if row["way"] == way]
        axes.plot(*zip(*line, strict=True), "o-", label=LIMITED.get(way, way))
    tokens = [int(n) for n in unique(rows, "tokens")]
    axes.set_yscale("log", base=2)
    powers_of_two([int(row["bytes"]) / MIB for row in rows], axes.yaxis, step=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{n // 1024}k" for n in tokens])
    axes.set(
        xlabel="tokens on a rank",
        ylabel="memory of the LM head and loss",
        title=f"Vocabulary {int(vocabulary) // 1024}k, hidden size {rows[0]['hidden']}, bfloat16: "
        "beside inputs, weight and gradients",
    )


def two_nodes(rows: Rows, axes: Axes) -> None:
    """Step over that of the flat ring against the rate of a NIC; of several tensors the first."""
    rows = [row for row in rows if row["phase"] == "step" and float(row["mbit"])]
    key = [rows[0][name] for name in ("tokens", "heads", "kv_heads")]
    rows = [row for row in rows if [row["tokens"], row["heads"], row["kv_heads"]] == key]
    rates = sorted(unique(rows, "mbit"), key=float)
    if len(rates) < 2:
        raise ValueError("no tensors were measured at several link rates")
    axes.axhline(1, color="0.45", label="ring flat")
    for name, color in SHOWN.items():
        line = {row["mbit"]: float(row["ratio"]) for row in rows if row["algorithm"] == name}
        if line:
            axes.plot([line[rate] for rate in rates], "o-", color=color, label=name)
    axes.set_xticks(range(len(rates)), ["no limit" if math.isinf(float(r)) else r for r in rates])
    axes.set(
        xlabel="Mbit/s between the two nodes, a rank",
        ylabel="time of a step over the flat ring's",
        title="{} tokens a rank, {} heads, {} KV heads".format(*key),
    )
    axes.set_ylim(0)


def convergence(rows: Rows, axes: Axes) -> None:
    """Training losses of burst from stock's of the same seed, and stock's of two seeds apart."""
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["loss"] == "training":
            curve = curves.setdefault((row["run"], row["seed"]), {})
            curve[int(row["step"])] = float(row["nats"])
    seeds = unique(rows, "seed")

    def apart(a: tuple[str, str], b: tuple[str, str], label: str, line: str) -> None:
        values = [abs(curves[a][step] - curves[b][step]) for step in curves[a]]
        axes.plot([*curves[a]], values, line, label=label, linewidth=1)

    apart(("stock", seeds[0]), ("stock", seeds[1]), "stock, two seeds", "k:")
    for name, color in zip(
        [run for run in unique(rows, "run") if run != "stock"], "gb", strict=True
    ):
        for number, seed in enumerate(seeds):
            label = f"{name} from stock, seed {seed}"
            apart((name, seed), ("stock", seed), label, color + ("--" if number else "-"))
    axes.set_title("Losses drift apart by rounding, less than by a seed")
    axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="difference of the loss, nats (means of 20 steps)")


PICTURES: Mapping[str, Callable[[Rows, Axes], None]] = {
    "convergence": convergence,
    "loss": loss,
    "two_nodes": two_nodes,
}


def powers_of_two(mebibytes: Sequence[float], axis: Any, step: int = 1) -> None:
    """Put ticks at powers of two."""
    powers = range(int(math.log2(min(mebibytes))), math.ceil(math.log2(max(mebibytes))) + 1, step)
    ticks = [2**n for n in powers]
    axis.set_ticks(ticks, [f"{n:g} MiB" if n < 1024 else f"{n // 1024} GiB" for n in ticks])


def unique(rows: Iterable[Mapping[str, str]], column: str) -> list[str]:
    return list(dict.fromkeys(row[column] for row in rows))


def draw(table: Path, path: Path) -> None:
    """Draw the picture of a CSV.

    Raises:
        ValueError: the CSV has no rows, or its benchmark no picture.
    """
    rows = read_csv(table)
    kind = rows[0].get("benchmark", "") if rows else ""
    if kind not in PICTURES:
        raise ValueError(f"{table}: pictures are made of {', '.join(PICTURES)}, not of '{kind}'")
    figure = Figure(figsize=(7.5, 4.7), layout="constrained")
    axes = figure.subplots()
    PICTURES[kind](rows, axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    source = "{date}, {device}, torch {torch}, Python {python}\n".format(**rows[0])
    source += "\n".join(textwrap.wrap(rows[0]["command"], 120))
    figure.text(0.01, -0.01, source, fontsize=6.5, color="0.4", va="top")
    save(figure, path)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("table", type=Path, metavar="CSV")
    arguments.add_argument("--output", type=Path, required=True, help="an .svg or .png")
    args = arguments.parse_args()
    try:
        draw(args.table, args.output)
    except (ValueError, OSError) as error:
        sys.exit(f"plot: {error}")


if __name__ == "__main__":
    main()
