"""Megatron's Mamba-2 (M) and GDN (G) layers follow our zigzag, on the CPU. (fast tier)"""

import re
from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.launcher import run_module


@pytest.mark.parametrize("ranks", slow_if({8}, [4, 8]))
def test_a_layer_on_the_shards_of_any_number_of_ranks_equals_one_rank(
    tmp_path: Path, ranks: int
) -> None:
    text = run_module("tests.training.linear_layers_alone", tmp_path, ranks)
    lines = re.findall(r"^P (\d), .*", text, re.M)
    assert set(map(int, lines)) == set(range(2, ranks + 1))
    print(text)
