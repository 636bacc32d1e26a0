"""Steps with all that saves memory at once equal steps with none of it. (fast tier: two)

tests/training/test_mlp_chunks.py, test_recompute.py, test_recompute_offload.py and
test_chunked_loss.py take them one by one.
"""

from pathlib import Path

import pytest

from tests.tier import slow_if
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
from tests.training.test_mlp_chunks import EXPERTS, GATED

PER_TOKEN = "--calculate-per-token-loss"
CP2 = "--context-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
HYBRID = "--hybrid-layer-pattern *-*-"
DOCUMENTS = "--dataloader-inter-document-masking --reset-position-ids --eod-mask-loss"
FSDP = """
    --use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor
    --data-parallel-sharding-strategy optim_grads_params
"""
UNIFORM = "--recompute-granularity full --recompute-method uniform --recompute-num-layers"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"
SAVINGS = f"""
    --lm-head-loss chunked --lm-head-chunk-size 100 --mlp-chunks 3 --burst-head-chunks 2
    --recompute-offload {UNIFORM} 1 --recompute-attention-fraction
"""
# Ranks, the fraction of attention that runs again, flags.
CASES = {
    "CP 2, experts, a shared one": (2, 0.5, f"{CP2} {GATED} {EXPERTS}"),
    "CP 4, tied, biases": (4, 0, "--context-parallel-size 4 --add-qkv-bias"),
    "one rank, MTP": (1, 0.5, f"--mtp-num-layers 1 {GATED}"),
    "CP 2, TP 2, MTP": (4, 0, f"{CP2} {TP2} --mtp-num-layers 1"),
    "PP 2, 4 micro-batches, untied": (2, 0.5, f"{PP2} --untie-embeddings-and-output-weights"),
    "PP 2, 4 micro-batches, CP 2, MTP": (4, 1, f"{PP2} {CP2} --mtp-num-layers 1"),
    "VPP, CP 2, documents": (4, 0.5, f"{INTERLEAVED} {CP2} {DOCUMENTS}"),
    "hybrid, CP 4, documents": (4, 0.5, f"--context-parallel-size 4 {HYBRID} {DOCUMENTS}"),
    "hybrid, TP 2, MTP": (2, 1, f"{TP2} {HYBRID}/*-"),
    "hybrid, PP 2": (2, 0, f"{PP2} --hybrid-layer-pattern *-|*-"),
    "hybrid, experts": (
        2,
        0,
        f"{CP2} {EXPERTS.replace('--moe-layer-freq 2', '')} {GATED} --hybrid-layer-pattern *-*E",
    ),
    "DP 2 with overlap, documents, experts": (
        2,
        0.5,
        f"{DOCUMENTS} {GATED} {EXPERTS} --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather",
    ),
    "Megatron-FSDP, CP 2 x DP 2, documents": (
        4,
        0.5,
        f"{FSDP} {CP2} {DOCUMENTS} --global-batch-size 8",
    ),
    "Megatron-FSDP, hybrid, MTP": (2, 0, f"{FSDP} {CP2} {HYBRID}/*-"),
    "Megatron-FSDP, TP 2": (4, 1, f"{FSDP} {TP2} {CP2}"),
}
FAST = {"CP 2, experts, a shared one", "hybrid, TP 2, MTP"}


@pytest.mark.parametrize("case", slow_if(CASES.keys() - FAST, CASES))
def test_losses_and_gradient_norms_equal_those_without(
    tmp_path: Path, data: tuple[str, ...], case: str
) -> None:
    ranks, fraction, flags = CASES[case]

    def run(name: str, *more: str) -> Log:
        return train(tmp_path / name, ranks, *data, *BURST, PER_TOKEN, *flags.split(), *more)

    expected, found = run("none"), run("all", *SAVINGS.split(), str(fraction))
    assert "chunked LM head loss: " in found.text and "--mlp-chunks 3: " in found.text
    assert "--mlp-chunks 3: 0 MLPs" not in found.text
    report(case, largest_difference(found, expected, STEPS), allowed(1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("method", [f"{UNIFORM} 2", f"{BLOCK} 1"])
def test_an_interrupted_training_goes_on_with_and_without(
    tmp_path: Path, data: tuple[str, ...], method: str
) -> None:
    """By blocks and pairs of layers; saved with all, resumed with all (bit for bit) and none."""
    flags = (*data, *BURST, PER_TOKEN, *CP2.split(), "--use-distributed-optimizer")
    savings = SAVINGS.replace(f"{UNIFORM} 1", method).split()
    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", str(HALF))
    load = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", str(HALF))
    expected = train(tmp_path / "whole", 2, *flags, *savings, "0.5", *save)
    resumed = train(tmp_path / "all", 2, *flags, *savings, "0.5", *load)
    rest = STEPS[HALF:]
    assert resumed.losses == {step: expected.losses[step] for step in rest}
    assert resumed.grad_norms == {step: expected.grad_norms[step] for step in rest}
    without = train(tmp_path / "none", 2, *flags, *load)
    report("resumed without", largest_difference(without, expected, rest), allowed(1e-5))


@pytest.mark.slow
def test_exceptions_leave_nothing_behind(tmp_path: Path, data: tuple[str, ...]) -> None:
    flags = (*data, *BURST, PER_TOKEN, *GATED.split(), *SAVINGS.split(), "0.5")
    expected = train(tmp_path / "whole", 1, *flags)
    module = "tests.training.exceptions_in_the_middle"
    found = train(tmp_path / "failing", 1, *flags, module=module)
    micro_batches = 2 * len(STEPS)
    assert f"failed: {4 * micro_batches} left: 0" in found.text
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
