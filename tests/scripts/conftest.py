"""A machine with stand-ins for what the scripts start."""

from pathlib import Path

import pytest

from tests.scripts.stand_ins import Machine, place


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return place(tmp_path)
