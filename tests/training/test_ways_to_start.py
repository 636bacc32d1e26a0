"""Attention by --spec alone, and another algorithm for every layer. (fast tier, some slow)"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.launcher import (
    BURST,
    HALF,
    STEPS,
    Log,
    allowed,
    largest_difference,
    report,
    train,
)

PER_TOKEN = "--calculate-per-token-loss"
CP2 = (PER_TOKEN, "--context-parallel-size", "2")
SPEC = "--spec megatron_burst.plugin.spec gpt --no-create-attention-mask-in-dataloader".split()
MIXED = "--cp-comm-type burst ulysses ring allgather".split()


def test_a_spec_is_enough_for_attention(
    tmp_path: Path, start: tuple[str, ...], runs: Callable[..., Log]
) -> None:
    found = train(tmp_path, 2, *start, *CP2, *SPEC, "--cp-comm-type", "burst")
    auto = "--burst-head-parallel-size", "auto"
    assert found.losses == runs(2, *CP2, *auto).losses
    assert "burst attention: burst on 2 ranks" in found.text


def test_our_spec_beside_our_flags_says_the_same_twice(runs: Callable[..., Log]) -> None:
    """--use-checkpoint-args brings it from a run that was started with it."""
    assert runs(2, *CP2, *SPEC[:3]).losses == runs(2, *CP2).losses


def test_every_layer_has_its_algorithm(tmp_path: Path, data: tuple[str, ...]) -> None:
    flags = (*data, *BURST, "--num-layers", "4", "--train-iters", str(HALF))
    found = train(tmp_path / "2", 2, *flags, *CP2, *MIXED)
    for name in ("burst", "ulysses", "ring", "allgather"):
        assert f"burst attention: {name} on 2 ranks" in found.text
    one = train(tmp_path / "1", 1, *flags, PER_TOKEN)
    difference = largest_difference(found, one, STEPS[:HALF])
    report("four algorithms", difference, allowed(1e-4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        # No stage has layers of all algorithms, yet all ranks make the groups of each.
        (4, "--pipeline-model-parallel-size 2 --cp-comm-type burst burst ulysses ulysses"),
        (
            2,
            "--cp-comm-type burst ulysses ring allgather --burst-layout segmented-zigzag "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--recompute-attention-fraction 0.5",
        ),
    ],
    ids=["pipeline", "recompute"],
)
def test_mixtures_with_more_of_megatron(runs: Callable[..., Log], ranks: int, flags: str) -> None:
    found = runs(ranks, *CP2, *flags.split())
    report(flags, largest_difference(found, runs(1, PER_TOKEN), STEPS), allowed(1e-4))


@pytest.mark.slow
def test_a_list_with_the_spec_alone(
    tmp_path: Path, start: tuple[str, ...], runs: Callable[..., Log]
) -> None:
    found = train(tmp_path, 2, *start, *CP2, *SPEC, *MIXED)
    assert found.losses == runs(2, *CP2, *MIXED).losses
