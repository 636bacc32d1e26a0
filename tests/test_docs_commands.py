"""Every command that the pages show is one that its program's own parser takes. (fast tier)"""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_burst.plugin.arguments import add_burst_arguments, check_ranks, configure
from megatron_burst.tools import command, options
from megatron_burst.tools.doctor.launch_line import split
from megatron_burst.tools.launch.__main__ import parse as parse_launch

megatron_arguments = pytest.importorskip("megatron.training.arguments")

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What stands for words of the reader's: dots, words in capitals that are no value, arrays.
PLACEHOLDER = re.compile(r"…|\.\.\.|YOUR|(YOUR-)?[A-Z]+-[A-Z-]+|FLAGS|\$\{\w+\[@\]\}")
STARTS = {"megatron-burst", "torchrun", "python", "python3"}
ENDS = {"|", ">", ">>", "&&", "&"}


def lines(text: str) -> Iterator[str]:
    """The command lines of a page's blocks of bash and diffs, each whole."""
    for kind, block in re.findall(r"^```(bash|diff)\n(.*?)^```", text, re.M | re.S):
        if kind == "diff":  # both versions, a sign before each of their lines
            versions = (re.findall(rf"^[{sign} ](.*)", block, re.M) for sign in "+-")
            block = "\n".join("\n".join(version).rstrip("\\ ") for version in versions)
        yield from block.replace("\\\n", " ").splitlines()


def words_of(line: str) -> list[str]:
    """The words up to a comment, a pipe or the next command."""
    if not re.search(r"megatron-burst|torchrun|-m megatron_burst\b", line):
        return []
    words = shlex.split(line, comments=True)
    return words[: next((n for n, word in enumerate(words) if word in ENDS), None)]


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """The page, and the words from our command or torchrun on."""
    found = []
    for page in PAGES:
        for words in map(words_of, lines(page.read_text())):
            if starts := [n for n, word in enumerate(words) if word in STARTS]:
                found.append((str(page.relative_to(ROOT)), tuple(words[starts[0] :])))
    return found


def of_verb(words: tuple[str, ...]) -> list[str] | None:
    """The words from a verb on, started as a command or a module; None: another program's."""
    own = words[1:] if words[0] == "megatron-burst" else ()
    if words[0] != "megatron-burst" and "megatron_burst" in words:
        own = words[words.index("megatron_burst") + 1 :]
    return [word for word in own if not PLACEHOLDER.fullmatch(word)] or None


VERBS = [(page, verb) for page, words in commands() if (verb := of_verb(words))]
TRAININGS = [
    (page, words)
    for page, words in commands()
    if not of_verb(words) and any("pretrain" in word for word in words)
]


def name(found: str | Sequence[str]) -> str:
    """Of a test: the page, and how the command begins."""
    return found if isinstance(found, str) else shlex.join(found)[:50]


@pytest.mark.parametrize(("page", "words"), VERBS, ids=name)
def test_a_verb_takes_its_words(page: str, words: list[str]) -> None:
    verb, *more = words
    own, behind = options.split_at_dashes(more)
    if verb == "launch":
        parse_launch(more)
    elif verb in command._LOAD_TORCH:
        command._parse_before(verb, more)
    else:
        importlib.import_module(f"megatron_burst.tools.{verb}").parser().parse_args(own)
    if behind and verb in ("doctor", "plan"):
        split(behind)  # a training command, or flags alone


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    return add_burst_arguments(megatron_arguments.add_megatron_arguments(made))


@pytest.mark.parametrize(("page", "words"), TRAININGS, ids=name)
def test_a_training_takes_its_flags(
    parser: argparse.ArgumentParser, page: str, words: tuple[str, ...]
) -> None:
    line = split([word for word in words if not PLACEHOLDER.fullmatch(word)], gpus_here=8)
    args = parser.parse_args(line.flags)
    if line.is_attached:
        configure(args)
    if "--nproc-per-node" in words:
        args.world_size = (line.nodes or 1) * (line.ranks_per_node or 1)
        check_ranks(args)


def test_commands_are_found_in_the_pages() -> None:
    assert {verb for _, (verb, *_) in VERBS} == {*command.VERBS}
    assert {page for page, _ in TRAININGS} >= {"README.md", "docs/million.md", "docs/tutorial.md"}
