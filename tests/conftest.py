"""Fixtures that every test may use."""

from collections.abc import Iterator

import pytest
import torch

from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
