"""The command line of a verb: help that begins with use, old names of flags, and --json."""

import argparse
from collections.abc import Sequence
from typing import Any

from megatron_burst.tools import terminal


class Parser(argparse.ArgumentParser):
    """A parser of one verb, whose help begins with examples and whose flags are not abbreviated."""

    def __init__(self, verb: str, about: str, *examples: str) -> None:
        super().__init__(
            prog=f"megatron-burst {verb}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.examples = examples
        self.new_names: dict[str, str] = {}
        self.add("--json", action="store_true", help="print one JSON object instead")

    def format_help(self) -> str:
        """Return the examples, then what argparse makes of the flags."""
        lines = "".join(f"  {example}\n" for example in self.examples)
        return f"examples:\n{lines}\n{super().format_help()}"

    def add(self, name: str, *, was: Sequence[str] = (), **settings: Any) -> None:
        """Add a flag; the names that it had still work for one version, with a warning."""
        self.add_argument(name, **settings)
        self.new_names |= dict.fromkeys(was, name)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words of the verb, old names of flags among them."""
        return self.parse_args([self._with_new_name(word) for word in words])

    def _with_new_name(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name not in self.new_names:
            return word
        new = self.new_names[name]
        terminal.complain(self.prog, [f"{name} is now called {new}"])
        return f"{new}{equals}{value}"


def split_at_dashes(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return a verb's own words, and those behind `--`: None where there is no `--`."""
    cut = words.index("--") if "--" in words else None
    return (list(words), None) if cut is None else (list(words[:cut]), list(words[cut + 1 :]))


def positive(text: str) -> int:
    """Return the number that is written there: the `type` of a flag that counts.

    Raises:
        ArgumentTypeError: it is below 1.
    """
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
