"""Holds the planner's predictions against what was measured, in docs/planner.md and its picture.

python scripts/docs/planner.py                       # how far they hold, in short
python scripts/docs/planner.py --write docs/planner.md
python scripts/docs/planner.py --fit                 # the constants of configs/published.toml
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import validation
from matplotlib.figure import Figure
from pages import fill, parser, write_csv
from plot import save
from rows import Row, rows_of

from megatron_burst.tools.plan.configs import Configs


def write_page(configs: Configs, page: Path) -> None:
    """Replace what stands between the markers of `page`; beside it lie its .csv and its .svg."""
    rows, table = rows_of(configs), page.with_suffix(".csv").name
    lines = [f"* {line}" for line in validation.messages(configs, rows)]
    lines.append(f"* every row: [{table}]({table})")
    fill(page, {"predictions": "\n".join(lines)})
    write_csv(page, [*map(csv_row, [*rows, *validation.two_nodes(configs)])])
    draw(rows, page.with_suffix(".svg"))


def csv_row(each: Row) -> dict[str, str]:
    return {
        **{"row": each.id, "code": each.code, "unit": each.unit},
        "measured": f"{each.value:.5g}",
        "predicted": f"{each.predicted:.5g}",
        "fitted": "fitted" if each.fitted else "",
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the predictions over the measurements, a colour a table; memory as triangles."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    axes = figure.subplots()
    for number, table in enumerate(dict.fromkeys(each.table for each in rows)):
        for fitted, mark in product((False, True), "o^"):
            marked = [e for e in rows if (e.table, bool(e.fitted)) == (table, fitted)]
            marked = [e for e in marked if (e.unit == "GiB") == (mark == "^")]
            points = [e.value for e in marked], [e.predicted for e in marked]
            face, label = "white" if fitted else f"C{number}", None
            if mark == "o" and not fitted:
                label = table
            axes.plot(*points, mark, color=f"C{number}", mfc=face, markersize=4, label=label)
    ends = [0.8 * min(e.value for e in rows), 1.25 * max(e.value for e in rows)]
    axes.plot(ends, ends, color="0.4", linewidth=0.8)
    axes.fill_between(ends, [0.85 * x for x in ends], [1.15 * x for x in ends], color="0.9")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    measured = "measured (circles: speeds and lengths, triangles: GiB; hollow: fitted; band: 15 %)"
    axes.set(xlabel=measured, ylabel="predicted")
    axes.legend(loc="upper left", frameon=False)
    save(figure, path)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--write", type=Path, metavar="PAGE", help="with a CSV and a picture")
    arguments.add_argument("--fit", action="store_true", help="fit the constants again; print them")
    args = arguments.parse_args()
    configs = Configs.read()
    if args.fit:
        for name, value in validation.fit(configs).items():
            row = configs.published["fitted"][name]["row"]
            print(f"{name} = {value:.3f}  # fitted on {row}")
    elif args.write:
        write_page(configs, args.write)
    else:
        print(*validation.messages(configs, rows_of(configs)), sep="\n")


if __name__ == "__main__":
    main()
