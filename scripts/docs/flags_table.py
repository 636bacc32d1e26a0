"""Writes the table of flags from the fields of the configurations, so that none is out of date.

python scripts/docs/flags_table.py [--write docs/flags.md]
"""

import argparse
import sys
from pathlib import Path

from megatron_burst.config import Flag, all_flags
from megatron_burst.kernels import KERNELS
from megatron_burst.plugin.arguments import MEGATRON

BEGIN = "<!-- flags: written by python scripts/docs/flags_table.py --write docs/flags.md -->"
END = "<!-- end of flags -->"


def table() -> str:
    """Return the flags as a Markdown table, the default of each first among its values."""
    rows = ["| flag | values, the default first | what it does |", "|---|---|---|"]
    for flag in all_flags():
        values = ", ".join(f"`{value}`" for value in _values(flag))
        rows.append(f"| `{flag.name}` | {values} | {flag.help.replace('|', '\\|')} |")
    return "\n".join(rows)


def _values(flag: Flag) -> list[str]:
    values = list(flag.values)
    if flag.field == "algorithm":
        return [MEGATRON, *values]
    if flag.field == "kernel":
        values = ["auto", *KERNELS]
    default = "none" if flag.default is None else str(flag.default)
    return [default, *(value for value in values if value != default)]


def replaced(text: str) -> str:
    """Return `text` with the present table between its two marker comments.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"expected these two lines, once each and in this order: {BEGIN} {END}")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main(argv: list[str] | None = None) -> None:
    """Run the command; SystemExit with the reason where the file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python scripts/docs/flags_table.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="replace the table between its markers in FILE"
    )
    args = parser.parse_args(argv)
    if args.write is None:
        sys.stdout.write(f"{table()}\n")
        return
    try:
        args.write.write_text(replaced(args.write.read_text()))
    except (ValueError, OSError) as error:
        parser.exit(1, f"flags_table: {args.write}: {error}\n")


if __name__ == "__main__":
    main()
