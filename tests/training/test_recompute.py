"""Steps that keep attention's results and compute the rest again equal steps that keep all. (fast)

With ρ = 1 Megatron's own recompute runs; with less its second pass of attention is a part.
"""

from collections.abc import Callable

import pytest

from tests.training.launcher import HALF, STEPS, Log, allowed, largest_difference, report

TOLERANCE = allowed(1e-5)
PER_TOKEN = "--calculate-per-token-loss"
CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PAIRS = UNIFORM[:-1] + "2"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"
ACCUMULATION = "--global-batch-size 8"
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage 1 {ACCUMULATION}"
SEGMENTED = "--burst-layout segmented-zigzag"


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    slow(1, UNIFORM, 0.5),
    (2, f"{CP2} {UNIFORM}", 0.5),
    slow(1, UNIFORM, 0.0),
    slow(1, UNIFORM, 1.0),
    slow(2, f"{CP2} {UNIFORM}", 0.0),
    slow(1, f"{UNIFORM} {ACCUMULATION}", 0.5),
    slow(1, f"{BLOCK} --bf16", 0.5),
    slow(1, PAIRS, 0.3),
    slow(1, SELECTIVE, 0.5),
    slow(2, f"{CP2} {SELECTIVE}", 0.0),
    slow(2, f"{INTERLEAVED} {BLOCK}", 0.0),
    slow(4, f"{CP2} {INTERLEAVED} {UNIFORM}", 0.5),
    slow(4, f"{CP2} --tensor-model-parallel-size 2 --sequence-parallel {UNIFORM}", 0.5),
    slow(2, f"{CP2} {SEGMENTED} {UNIFORM}", 0.25),
    slow(2, f"{CP2} {UNIFORM} --dataloader-inter-document-masking", 0.5),
    slow(2, f"{CP2} {SELECTIVE} --window-size 20,0 --window-attn-skip-freq 2", 0.5),
    slow(2, f"{CP2} {UNIFORM} --split 90,10,0 --eval-iters 1 --eval-interval {HALF}", 0.5),
]


@pytest.mark.parametrize(("ranks", "flags", "fraction"), CASES)
def test_losses_and_gradient_norms_equal_those_without(
    runs: Callable[..., Log], ranks: int, flags: str, fraction: float
) -> None:
    plain = flags
    for way in (UNIFORM, PAIRS, BLOCK, SELECTIVE):
        plain = plain.replace(way, "")
    expected = runs(ranks, PER_TOKEN, *plain.split())
    keep = ("--recompute-attention-fraction", str(fraction))
    found = runs(ranks, PER_TOKEN, *flags.split(), *keep)
    assert found.losses.keys() == expected.losses.keys() == set(STEPS)
    uneven = 0 < fraction < 1 and CP2 in flags and SEGMENTED not in flags
    assert found.text.count("segmented-zigzag spreads them evenly") == uneven
    difference = largest_difference(found, expected, STEPS)
    report(f"{flags}, {fraction}", difference, 2**-8 if "--bf16" in flags else TOLERANCE)
