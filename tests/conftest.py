"""Fixtures that every test may use, and which tests a process of a parallel run gets."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tests.uncompiled  # noqa: F401
from tests.tier import VARIABLE
from tests.workers import WorkerPool

TRAININGS = "tests/training", "tests/tools/test_config.py"  # all that tests.training.launcher runs


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" not in config.option.markexpr:
        os.environ[VARIABLE] = "all"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The trainings first: they take longest and stay together."""
    items.sort(key=lambda item: not item.nodeid.startswith(TRAININGS))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not look at it, whenever a test asks for one."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """For --dist loadfile: all trainings count as one file, so that they share what they train."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TrainingsTogether(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            together = nodeid.startswith(TRAININGS)
            return TRAININGS[0] if together else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which says little
    return TrainingsTogether(config, log)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
