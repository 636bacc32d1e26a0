"""The command line of a verb: help that begins with use, and --json."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

LARGEST = 2**31 - 1
"""Number that a flag may count."""
_UNITS = {"k": 2**10, "m": 2**20}  # of tokens


class Parser(argparse.ArgumentParser):
    """A parser of one verb, whose help begins with examples and whose flags are not abbreviated."""

    def __init__(self, verb: str, about: str, *examples: str) -> None:
        super().__init__(
            prog=f"megatron-burst {verb}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.examples, self._takes_more = examples, any(" -- " in text for text in examples)
        self.add_argument("--json", action="store_true", help="print one JSON object instead")

    def format_help(self) -> str:
        """Return the examples, then what argparse makes of the flags."""
        lines = "".join(f"  {example}\n" for example in self.examples)
        return f"examples:\n{lines}\n{super().format_help()}"

    def error(self, message: str) -> NoReturn:
        """End with a message; behind a word that is none of ours, where it may belong."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        if self._takes_more and unknown:
            near = get_close_matches(words.split()[0], self._option_string_actions, 1, 0.8)
            what = "Megatron's flags go" if words.startswith("--") else "a command goes"
            place = f"{what} behind --: {self.prog} … -- {words}"
            message += f"; the nearest is {near[0]}" if near else f"; {place}"
        super().error(message)


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return a verb's own words, and those behind `--`: None where there is no `--`."""
    cut = words.index("--") if "--" in words else None
    return (list(words), None) if cut is None else (list(words[:cut]), list(words[cut + 1 :]))


def positive(text: str) -> int:
    """Return the number that is written there: the `type` of a flag that counts.

    Raises:
        ArgumentTypeError: it is below 1, or too large.
    """
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"{value} is more than {LARGEST}")
    return value


def tokens(text: str) -> int:
    """Return a number of tokens, as 131072, 128k or 1M: the `type` of a flag.

    Raises:
        ArgumentTypeError: it is none, or below 1.
    """
    unit = _UNITS.get(text[-1:].lower(), 1)
    digits = text if unit == 1 else text[:-1]
    if not (digits.isascii() and digits.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, as 131072, 128k or 1M")
    return positive(str(unit * int(digits)))


def in_units(count: int) -> str:
    """Write a number of tokens as `tokens` reads it, the short form behind it: 131072 (128k)."""
    for name, size in (("M", 2**20), ("k", 2**10)):
        if count % size == 0:
            return f"{count} ({count // size}{name})"
    return str(count)
