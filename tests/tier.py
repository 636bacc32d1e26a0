"""How thorough a run is: the fast tier takes fewer steps and examples than all tests together.

`tests/conftest.py` sets the variable where pytest's `-m` leaves out no slow tests.
"""

import os
from collections.abc import Container, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

VARIABLE = "MEGATRON_BURST_TESTS"


def is_thorough() -> bool:
    return os.environ.get(VARIABLE) == "all"


def examples(number: int) -> settings:
    """The hypothesis settings of a property tried so often, a fifth as often in the fast tier."""
    return settings(
        max_examples=number if is_thorough() else number // 5,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # by the clock, on a machine with more to do
    )


def some[T](cases: Sequence[T], step: int, first: int = 0) -> Sequence[T]:
    """All cases, in the fast tier one in so many: `step` shares no factor with what repeats."""
    return cases if is_thorough() else cases[first::step]


def one_in(step: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases as values of several parameters; all but one in so many are marked slow."""
    return [
        pytest.param(*case, marks=[pytest.mark.slow] if number % step else [])
        for number, case in enumerate(cases)
    ]


def in_turn(firsts: Iterable[Any], seconds: Sequence[Any]) -> list[Any]:
    """All pairs as values of two parameters; but for one of each first, in turn, they are slow."""
    return [
        pytest.param(first, second, marks=[pytest.mark.slow] * (number % len(seconds) != place))
        for number, first in enumerate(firsts)
        for place, second in enumerate(seconds)
    ]


def slow_if[T](slow: Container[T], cases: Iterable[T]) -> list[Any]:
    """The cases as values of a parameter; some are marked slow."""
    return [pytest.param(c, marks=[pytest.mark.slow] if c in slow else []) for c in cases]
