"""The one command: its verbs, its help, and what it says where something is wrong. (fast tier)"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_burst.kernels import KERNELS
from megatron_burst.tools import command, options
from megatron_burst.tools.arguments import verify
from megatron_burst.tools.command import VERBS, main
from megatron_burst.tools.verify import masks
from tests.processes import python
from tests.tools.conftest import Printed

ROOT = Path(__file__).parents[2]


def test_help_shows_examples_first_and_every_verb(printed: Printed) -> None:
    said = printed("--help")
    assert said.startswith("examples:\n  megatron-burst ")
    for name, (_, about) in VERBS.items():
        assert f"  {name}" in said and about in said
        found = find_spec(f"megatron_burst.tools.{VERBS[name][0]}")
        assert found and found.origin and "def main(argv: " in Path(found.origin).read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "usage: megatron-burst VERB"),
        (["paln"], f"there is no verb 'paln'; the verbs are {', '.join(VERBS)}\n"),
        ([":on:"], "there is no verb ':on:'"),  # no emoji
        # A report with it could not be written after the trainings.
        (["compare", "--output", "r\udcff", "--toy"], r"'r\udcff' is not UTF-8"),
    ],
)
def test_what_is_no_verb_or_no_text_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--tensor-model-parallel-size 2",
            "Megatron's flags go behind --: "
            "megatron-burst plan … -- --tensor-model-parallel-size 2",
        ),
        ("--clustr h100", "the nearest is --cluster"),
        ("torchrun x.py", "a command goes behind --: megatron-burst plan … -- torchrun x.py"),
    ],
)
def test_a_flag_in_the_wrong_place_is_shown_its_own(
    printed: Printed, words: str, said: str
) -> None:
    found = printed(f"plan --model 7b {words}", 2)
    assert f"error: unrecognized arguments: {words}; {said}\n" in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --model 7b --search --ladder", "--ladder: not allowed with argument --search"),
        ("compare --judged-steps 0", "argument --judged-steps: 0 is not positive"),
        ("doctor --shape 30,8,128", "30 heads are no multiple of 8 kv heads"),
    ],
)
def test_words_that_cannot_be_meant_are_refused_at_once(
    printed: Printed, words: str, said: str
) -> None:
    assert said in printed(words, 2)


@pytest.mark.parametrize("tokens", [1, 2, 3, 256])
def test_verify_draws_documents_of_any_number_of_tokens(tokens: int) -> None:
    ours, reference = masks("window+documents", tokens)
    assert ours.documents and ours.documents[-1] == tokens
    assert (*ours.documents,) == (*reference.cu_seqlens.tolist(),)


def test_python_m_gives_a_verb_its_words_and_returns_its_status() -> None:
    ran = python("-m", "megatron_burst", "launch", "check", "--no-such-flag")
    assert ran.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in ran.stderr


def test_without_an_output_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as >&- leaves it
    assert main(["--help"]) == 0


def test_who_stops_reading_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["--help"]) == 1
        pipe.flush()


def verb_that(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a verb into the place of all, whose main raises `error`."""

    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(
        command.importlib,
        "import_module",
        lambda _: SimpleNamespace(parser=argparse.ArgumentParser, main=fail),
    )


HELP_OF_ALL = """
import sys
sys.modules["torch"] = None
from megatron_burst.tools.command import VERBS, main
for verb in VERBS:
    try:
        print(f"# {verb}", flush=True)
        status = main([verb, "--help"])
    except SystemExit as end:
        status = end.code
    assert status == 0, verb
try:
    main(["plan", "--gpus", "0"])
except SystemExit as end:
    assert end.code == 2
"""


def test_help_and_what_is_refused_need_no_torch() -> None:
    """Torch takes a second or two to load, which nobody waits for to read of a flag."""
    ran = python("-c", HELP_OF_ALL)
    assert ran.returncode == 0, ran.stdout[-500:] + ran.stderr
    assert all(f"usage: megatron-burst {verb}" in ran.stdout for verb in VERBS)
    assert "# plan\nexamples:\n  megatron-burst plan " in ran.stdout
    assert "plan: error: argument --gpus: 0 is not positive" in ran.stderr


def test_the_kernels_that_verify_offers_are_all() -> None:
    assert tuple(KERNELS) == verify.KERNELS


def test_a_missing_package_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, printed: Printed
) -> None:
    verb_that(monkeypatch, ModuleNotFoundError(name="megatron.core"))
    assert printed("compare", 1) == (
        "megatron-burst compare: megatron is not installed: pip install 'megatron-core==0.19.*', "
        "or all that this needs: megatron-burst[train]\n"
    )
    monkeypatch.setitem(sys.modules, "megatron_burst.tools.terminal", None)
    verb_that(monkeypatch, ModuleNotFoundError(name="rich"))
    assert "plan: rich is not installed: pip install rich, or" in printed("plan", 1)
    verb_that(monkeypatch, ModuleNotFoundError(name="megatron_burst.tools.none"))
    with pytest.raises(ModuleNotFoundError):  # our own fault
        main(["compare"])


@pytest.mark.parametrize("error", [ValueError("P is 3"), OSError("P is 3")])
def test_wrong_input_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, printed: Printed, error: Exception
) -> None:
    verb_that(monkeypatch, error)
    assert printed("plan", 1) == "megatron-burst plan: P is 3\n"


def test_tokens_are_written_short_or_long() -> None:
    read = [*map(options.tokens, ("131072", "128k", "1M", "64K", "1000"))]
    assert read == [2**17, 2**17, 2**20, 2**16, 1000]
    written = [options.in_units(count) for count in read[1:]]
    assert written == ["131072 (128k)", "1048576 (1M)", "65536 (64k)", "1000"]


@pytest.mark.parametrize("text", ["0", "0k", "-1", "k", "", "1.5M", "2kk", "²"])
def test_what_counts_no_tokens_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        options.tokens(text)


def test_words_behind_two_dashes_are_anothers() -> None:
    assert options.split_at_dashes(["a", "--", "b", "--"]) == (["a"], ["b", "--"])
    assert options.split_at_dashes(["a", "--"]) == (["a"], [])
    assert options.split_at_dashes(["a"]) == (["a"], None)
