"""What the tools print: tables and lines that no terminal's width cuts, and errors in red."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

type Columns = Mapping[str, tuple[str, float, str]]
"""By their headings: the figure, what it is multiplied by, and its form."""
NONE = "-"
"""What a table shows where a figure is missing, or has no meaning."""
_WIDTH = 200  # of tables: wider than a narrow terminal, so that no number is cut


def console() -> Console:
    """Return a console on stdout that prints words as they are."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=_WIDTH)


def table(left: Iterable[str], right: Iterable[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """Return a table of columns of words, then of columns of numbers; plain where it is piped."""
    made = Table(title_justify="left", box=SIMPLE if sys.stdout.isatty() else None)
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, no_wrap=True, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


def cells(figures: Mapping[str, Any], columns: Columns) -> list[str]:
    """Return what a row shows in columns, `NONE` where it lacks a figure."""
    shown = ((figures.get(name), factor, form) for name, factor, form in columns.values())
    return [NONE if x is None else form.format(x * factor) for x, factor, form in shown]


def complain(command: str, problems: Iterable[str]) -> None:
    """Print each problem on stderr, behind the name of the command."""
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    for problem in problems:
        errors.print(f"{command}: {problem}", style="red")
