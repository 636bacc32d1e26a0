"""The parts of a page of docs that a script writes, each between two comments."""

import argparse
import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_PART = re.compile(r"(<!-- (\S+): written by .*? -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose --help is a script's docstring."""
    as_written = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=as_written)


def fill(page: Path, parts: Mapping[str, str]) -> None:
    """Write `parts`, by the names in the comments, into a page."""
    page.write_text(filled(page.read_text(), parts))


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return a page's text with other parts.

    Raises:
        ValueError: the page has not each of them once, and no other.
    """
    names = [name for _, name, _ in _PART.findall(text)]
    if sorted(names) != sorted(parts):
        raise ValueError(f"the page has parts {names}, and those that are written are {[*parts]}")
    return _PART.sub(lambda part: f"{part[1]}\n{parts[part[2]].strip()}\n\n{part[3]}", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', '\\|') for c in line)} |" for line in lines)


def read_csv(page: Path) -> list[dict[str, str]]:
    """Return the rows of the table beside a page."""
    with page.with_suffix(".csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def write_csv(page: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write the table beside a page, its columns those of the first row."""
    with page.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
