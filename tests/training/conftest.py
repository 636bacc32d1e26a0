"""A corpus, a common starting point and the runs that several tests compare with."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Not before the options are read: of them `launcher` learns how many steps there are.
if TYPE_CHECKING:
    from tests.training.launcher import Log


def make_corpus(directory: Path, *inputs: str) -> tuple[str, ...]:
    """Write a corpus and return the flags that train on it."""
    from tests.training.launcher import run_job

    words = ("corpus", "--output", str(directory), *inputs)
    status, said = run_job("megatron_burst.tools.command", directory, 1, words)
    assert status == "0", said
    return ("--data-path", str(directory / "corpus"), "--data-cache-path", str(directory / "cache"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Real text with long documents: a part of Python's standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return make_corpus(tmp_path_factory.mktemp("corpus"), "--input", str(library / "asyncio"))


@pytest.fixture(scope="session")
def corpus_of_long_documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The whole standard library."""
    return make_corpus(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Stretches of one-letter documents between long ones.

    Where the end of a document is masked, half of the tokens of some ranks are and none of others.
    """
    directory = tmp_path_factory.mktemp("short")
    texts = ("a long document " * 20 if i % 60 == 0 else "abcdefg"[i % 7] for i in range(1200))
    lines = (json.dumps({"text": text}) for text in texts)
    (directory / "documents.jsonl").write_text("\n".join(lines))
    return make_corpus(directory / "corpus", "--input", str(directory / "documents.jsonl"))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, data: tuple[str, ...]) -> tuple[str, ...]:
    """Flags that start from one checkpoint, because Megatron seeds each pipeline stage apart.

    It comes from a run with Megatron's own core attention: that it loads everywhere shows that
    checkpoints are interchangeable.
    """
    from tests.training.launcher import train

    directory = tmp_path_factory.mktemp("start")
    train(directory, 1, *data, "--train-iters", "1", "--save", str(directory / "checkpoint"))
    return (*data, "--load", str(directory / "checkpoint"), "--finetune", "--no-load-optim")


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., "Log"]:
    """Train; equal calls share one run."""
    from tests.training.launcher import train

    finished: dict[object, Log] = {}

    def train_once(ranks: int, *flags: str, **module: str) -> "Log":
        key = ranks, flags, *module.values()
        if key not in finished:
            finished[key] = train(tmp_path_factory.mktemp("run"), ranks, *flags, **module)
        return finished[key]

    return train_once


@pytest.fixture(scope="session")
def runs(once: Callable[..., "Log"], start: tuple[str, ...]) -> Callable[..., "Log"]:
    """Train from the common start; equal calls share one run."""
    from tests.training.launcher import BURST

    return lambda ranks, *flags: once(ranks, *start, *BURST, *flags)
