"""Random calls against dense ones: the same few each time, a minute of new ones each day.

(fast tier; the minute slow)
"""

import datetime

import pytest
from fuzz import KINDS, Tensors, draw, fuzz, judge  # noqa: E402

from tests.workers import WorkerPool


def test_a_few_calls_are_right(workers: WorkerPool) -> None:
    assert {draw(0, number).kind for number in range(16)} == set(KINDS)
    ends = fuzz(workers, 0, range(16), 120.0)
    assert not ends["failed"] and ends["equal"] > 8, ends


class Answers:
    """Workers that answer with what is given."""

    def __init__(self, *replies: Tensors) -> None:
        self.replies = replies

    def run(self, *_: object, **__: object) -> list[Tensors]:
        return [*self.replies]


def test_a_gradient_or_lse_that_is_missing_on_a_rank_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    number = next(n for n in range(99) if (c := draw(0, n)).kind == "attention" and c.frozen)
    case = draw(0, number)
    found = {name: x for name, x in case.expected().items() if name not in case.frozen}
    for name in found:
        lacks = {other: x for other, x in found.items() if other != name}
        for replies in ([found, lacks], [lacks, found], [lacks]):
            assert judge(Answers(*replies), case) == f"missing {name}"
    assert fuzz(Answers({}), 0, [number], 60.0) == {"failed": 1}
    assert capsys.readouterr().out.startswith("FAILED --seed 0 --case")


@pytest.mark.slow
def test_a_minute_of_calls_is_right(workers: WorkerPool) -> None:
    ends = fuzz(workers, datetime.date.today().toordinal(), range(10**6), 60.0)
    assert not ends["failed"] and ends["equal"] > ends["refused"], ends
