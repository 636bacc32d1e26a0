"""Steps with the inputs of layers in the host's memory equal steps without. (fast tier)

The CPU platform stands in for the card: copies are real, streams and events are not
(tests/transport/test_host.py orders them).
"""

from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.launcher import BURST, Log, train

PER_TOKEN = "--calculate-per-token-loss"
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
KEEP = "--recompute-attention-fraction"
CASES = {
    "CP 2, half of attention kept, MLPs in chunks": (
        2,
        f"--context-parallel-size 2 {UNIFORM} 1 {KEEP} 0.5 --mlp-chunks 3",
    ),
    "by block": (1, BLOCK),
    "two layers a checkpoint, all of attention kept": (1, f"{UNIFORM} 2 {KEEP} 0"),
    "TP 2, sequence parallel": (
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel {UNIFORM} 1",
    ),
    "TP 2, spread over its ranks": (
        2,
        f"--tensor-model-parallel-size 2 --distribute-saved-activations {UNIFORM} 1",
    ),
    "PP 2, 4 micro-batches, attention kept": (
        2,
        f"--pipeline-model-parallel-size 2 --global-batch-size 8 {UNIFORM} 1 {KEEP} 0",
    ),
    "hybrid": (2, f"--context-parallel-size 2 --hybrid-layer-pattern *-*- {UNIFORM} 1 {KEEP} 0.5"),
    "MTP": (1, f"--mtp-num-layers 1 {UNIFORM} 1 {KEEP} 0.5"),
    "evaluation": (1, f"{UNIFORM} 1 --eval-interval 2 --eval-iters 1 --split 90,10,0"),
}
FAST = {"CP 2, half of attention kept, MLPs in chunks"}


@pytest.mark.parametrize("case", slow_if(CASES.keys() - FAST, CASES))
def test_losses_and_gradient_norms_are_the_same(
    tmp_path: Path, data: tuple[str, ...], case: str
) -> None:
    ranks, flags = CASES[case]

    def run(name: str, *more: str) -> Log:
        return train(tmp_path / name, ranks, *data, *BURST, PER_TOKEN, *flags.split(), *more)

    expected, found = run("card"), run("host", "--recompute-offload")
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
