"""A spec that an earlier version put into checkpoints. (fast tier)"""

from collections.abc import Callable

from tests.training.launcher import Log

CP2 = ("--calculate-per-token-loss", "--context-parallel-size", "2")
SPEC = "--spec megatron_burst.plugin.spec gpt".split()


def test_our_spec_beside_our_flags_is_passed_over(runs: Callable[..., Log]) -> None:
    """--use-checkpoint-args brings it from a run that was started with it."""
    assert runs(2, *CP2, *SPEC).losses == runs(2, *CP2).losses
