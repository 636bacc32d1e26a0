"""Fixtures that every test may use, and which tests a process of a parallel run gets."""

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tier import VARIABLE, is_thorough

if TYPE_CHECKING:
    from tests.workers import WorkerPool

# All that tests.training.launcher runs.
TRAININGS = "tests/training", "tests/tools/test_config.py", "tests/plugin/test_cpu_platform.py"
# Which compare with nothing that the others train.
ALONE = "tests/training/test_kills.py", "tests/training/test_killed_jobs.py"


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" not in config.option.markexpr:
        os.environ[VARIABLE] = "all"
    if not getattr(config.option, "numprocesses", None):  # it runs tests itself
        import tests.uncompiled  # noqa: F401
    gc.disable()  # while so much is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The trainings first: they take longest and stay together."""
    items.sort(key=lambda item: not item.nodeid.startswith(TRAININGS))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it, whenever a test asks for one."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """For tests that ask for many collections: those before have left much to look at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_are_as_before() -> Iterator[None]:
    """What starts processes sets them; those of later tests would inherit what is ignored."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@cache
def together(file: str) -> str:
    """What names the tests that one process gets: those of the file, or more that share something.

    All trainings share what they train, and the fast tests over several ranks what forks them.
    """
    if file.startswith(TRAININGS) and file not in ALONE:
        return TRAININGS[0]
    text = (Path(__file__).parents[1] / file).read_text()
    forks = "tests.workers" in text or "import accuracy" in text
    return "tests.workers" if forks and not is_thorough() else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """For --dist loadfile: what belongs together counts as one file."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return together(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # by the number of tests, which says little
    return Together(config, log)


@pytest.fixture(scope="session")
def workers() -> Iterator["WorkerPool"]:
    from tests.workers import WorkerPool

    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
