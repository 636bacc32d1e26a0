"""Random calls against dense ones: the same few each time, a minute of new ones each day.

(fast tier; the minute slow)
"""

import datetime
import sys
from pathlib import Path

import pytest

from tests.workers import WorkerPool

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

from fuzz import KINDS, draw, fuzz  # noqa: E402


def test_a_few_calls_are_right(workers: WorkerPool) -> None:
    assert {draw(0, number).kind for number in range(16)} == set(KINDS)
    ends = fuzz(workers, 0, range(16), 120.0)
    assert not ends["failed"] and ends["equal"] > 8, ends


@pytest.mark.slow
def test_a_minute_of_calls_is_right(workers: WorkerPool) -> None:
    ends = fuzz(workers, datetime.date.today().toordinal(), range(10**6), 60.0)
    assert not ends["failed"] and ends["equal"] > ends["refused"], ends
