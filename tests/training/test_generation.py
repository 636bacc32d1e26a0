"""Megatron's static inference engine on a model with our attention. (fast tier)"""

from pathlib import Path

from tests.training.launcher import run_module


def test_tokens_are_those_of_megatrons_attention(tmp_path: Path) -> None:
    text = run_module("tests.training.generation", tmp_path, 1)
    assert text.count(": 72 tokens alike") == 3


def test_over_ranks_the_first_token_is_refused(tmp_path: Path) -> None:
    text = run_module("tests.training.generation", tmp_path, 2, "--context-parallel-size", "2")
    why = "no token can be generated over 2 context-parallel ranks: pass --context-parallel-size 1"
    assert text.count(f": {why}") == 2 * 3
