"""Flags that several verbs share: one name and one meaning each, and help that begins with use."""

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
        self.where: argparse._ActionsContainer = self
        self.new_names: dict[str, str] = {}

    def format_help(self) -> str:
        """Return the examples, then what argparse makes of the flags."""
        lines = "".join(f"  {example}\n" for example in self.examples)
        return f"examples:\n{lines}\n{super().format_help()}"

    def add(self, name: str, *, was: Sequence[str] = (), **settings: Any) -> None:
        """Add a flag; the names that it had still work for one version, with a warning."""
        self.where.add_argument(name, **settings)
        self.new_names |= dict.fromkeys(was, name)

    def section(self, title: str) -> None:
        """Put the flags that follow under a heading of the help."""
        self.where = self.add_argument_group(title)

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


def add_cluster(parser: Parser, *, was_gpus: Sequence[str] = (), nodes: int | None = None) -> None:
    """Add --nodes and --gpus-per-node, the machines that are meant."""
    text = "of the cluster" + (f" (default: {nodes})" if nodes else "")
    parser.add("--nodes", type=positive, default=nodes, metavar="M", help=f"nodes {text}")
    text = "GPUs, and ranks, of a node"
    parser.add("--gpus-per-node", was=was_gpus, type=positive, metavar="L", help=text)


def add_shape(parser: Parser, *, heads: int | None = None, head_dim: int | None = None) -> None:
    """Add the shape of one rank's attention: heads, kv heads, their sizes, batch."""

    def number(name: str, default: int | None, text: str) -> None:
        shown = text + (f" (default: {default})" if default else "")
        parser.add(name, type=positive, default=default, metavar="N", help=shown)

    number("--heads", heads, "query heads of a rank, after tensor parallelism")
    number("--kv-heads", None, "kv heads of a rank (default: as many as --heads)")
    number("--head-dim", head_dim, "of Q and K")
    number("--value-head-dim", None, "of V (default: that of --head-dim)")
    number("--batch", 1, "sequences")


def add_json(parser: Parser) -> None:
    """Add --json: the same as is printed, as one JSON object."""
    parser.add("--json", action="store_true", help="print one JSON object instead")
