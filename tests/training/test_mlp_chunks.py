"""Steps with MLPs in chunks of tokens equal steps with Megatron's own. (fast tier)"""

from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.launcher import BURST, Log, allowed, largest_difference, report, train

PER_TOKEN = "--calculate-per-token-loss"
CHUNKS = ("--mlp-chunks", "3")
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
EXPERTS = (
    "--num-experts 4 --moe-layer-freq 2 --moe-router-topk 2 --disable-bias-linear "
    "--moe-shared-expert-intermediate-size 96 --moe-grouped-gemm"
)
GATED = "--swiglu --disable-bias-linear"
HYBRID = "--hybrid-layer-pattern *-*-"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
CASES = {
    "CP 2, one layer a checkpoint": (2, f"--context-parallel-size 2 {GATED} {FULL} 1"),
    "biases, two layers a checkpoint": (1, f"{FULL} 2"),
    "DP 2 with overlap": (2, OVERLAP),
    "TP 2, sequence parallel": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {FULL} 1"),
    "TP 2": (2, f"--tensor-model-parallel-size 2 {GATED}"),
    "PP 2, 4 micro-batches": (
        2,
        f"--pipeline-model-parallel-size 2 --global-batch-size 8 {GATED} {FULL} 1",
    ),
    "shared experts": (1, f"{GATED} {EXPERTS} --moe-shared-expert-gate"),
    "hybrid": (2, f"--context-parallel-size 2 {HYBRID} {FULL} 1"),
    "MTP": (1, f"--mtp-num-layers 1 {GATED} {FULL} 1"),
}
FAST = {"CP 2, one layer a checkpoint", "DP 2 with overlap"}


@pytest.mark.parametrize("case", slow_if(CASES.keys() - FAST, CASES))
def test_losses_and_gradient_norms_equal_megatrons(
    tmp_path: Path, data: tuple[str, ...], case: str
) -> None:
    ranks, flags = CASES[case]

    def run(name: str, *more: str) -> Log:
        words = (*data, *BURST, PER_TOKEN, *flags.split(), *more)
        return train(tmp_path / name, ranks, *words)

    expected, found = run("whole"), run("chunks", *CHUNKS)
    assert "--mlp-chunks 3: " in found.text and "--mlp-chunks 3: 0 MLPs" not in found.text
    difference = largest_difference(found, expected, list(expected.losses))
    report(case, difference, allowed(1e-5))
