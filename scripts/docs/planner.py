"""Holds the planner's predictions against what was measured, in docs/planner.md and its picture.

python scripts/docs/planner.py                       # how far they hold, in short
python scripts/docs/planner.py --write docs/planner.md
python scripts/docs/planner.py --fit                 # the constants of configs/published.toml
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

import validation
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from picture import save
from validation import Compared

from megatron_burst.tools.plan.configs import Configs

_COMMAND = "python scripts/docs/planner.py --write docs/planner.md"
BEGIN = f"<!-- predictions: written by {_COMMAND} -->"
END = "<!-- end of predictions -->"
COLUMNS = ("row", "code", "unit", "measured", "predicted", "fitted")
_MARKS = {"tokens/s/GPU": "o", "TFLOP/s": "s", "GiB": "^"}


def write_page(configs: Configs, page: Path) -> None:
    """Replace what stands between the markers of `page`; beside it lie its .csv and its .svg.

    Raises:
        ValueError: the page does not have both markers.
    """
    text = page.read_text()
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{page} has no lines {BEGIN} and {END}")
    rows = validation.rows_of(configs)
    of_gpus = [*validation.compare_speed(configs, rows), *validation.compare_memory(configs, rows)]
    lines = [f"* {line}" for line in validation.messages(configs, rows)]
    table = page.with_suffix(".csv")
    lines.append(f"* every row, measured and predicted: [{table.name}]({table.name})")
    page.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{tail}")
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(map(csv_row, [*of_gpus, *validation.compare_two_nodes(configs)]))
    draw(of_gpus, page.with_suffix(".svg"))


def csv_row(each: Compared) -> list[str]:
    """What COLUMNS names."""
    fitted = "fitted" if each.fitted else ""
    return [each.id, each.code, each.unit, f"{each.measured:.5g}", f"{each.predicted:.5g}", fitted]


def draw(found: Iterable[Compared], path: Path) -> None:
    """Draw the predictions over the measurements, a mark for each unit."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    every = list(found)
    for unit, mark in _MARKS.items():
        _marks(axes, [each for each in every if each.unit == unit], unit, mark)
    ends = [0.8 * min(e.measured for e in every), 1.25 * max(e.measured for e in every)]
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="0.9")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.set_xlabel("measured (A800; band: 15 %)")
    axes.set_ylabel("predicted")
    axes.legend(loc="upper left", frameon=False)
    save(figure, path)


def _marks(axes: Axes, found: list[Compared], unit: str, mark: str) -> None:
    color = f"C{list(_MARKS).index(unit)}"
    for fitted, face in ((False, color), (True, "white")):
        points = [(e.measured, e.predicted) for e in found if e.fitted == fitted]
        label = None if fitted else f"{unit} (hollow: fitted)"
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.plot(x, y, mark, color=color, markerfacecolor=face, markersize=5, label=label)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="with all rows in a CSV and a picture"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants again; print them")
    args = parser.parse_args(argv)
    configs = Configs.read()
    if args.fit:
        for name, value in validation.fit(configs).items():
            row = configs.published["fitted"][name]["row"]
            print(f"{name} = {value:.3f}  # fitted on {row}")
    elif args.write:
        write_page(configs, args.write)
    else:
        print(*validation.messages(configs, validation.rows_of(configs)), sep="\n")


if __name__ == "__main__":
    main()
