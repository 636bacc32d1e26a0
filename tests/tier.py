"""How thorough a run is: the fast tier takes fewer steps and examples than all tests together.

`tests/conftest.py` sets the variable where pytest's `-m` leaves out no slow tests.
"""

import os

from hypothesis import settings

VARIABLE = "MEGATRON_BURST_TESTS"


def is_thorough() -> bool:
    return os.environ.get(VARIABLE) == "all"


def examples(number: int) -> settings:
    """The hypothesis settings of a property tried so often, a quarter as often in the fast tier."""
    return settings(max_examples=number if is_thorough() else number // 4, deadline=None)
