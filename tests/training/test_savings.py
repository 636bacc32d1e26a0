"""Steps with what saves memory, one by one and all at once, equal steps without. (fast: two)

The CPU platform stands in for the card: copies to the host are real, streams and events are not
(tests/transport/test_host.py orders them). The chunked loss alone:
test_chunked_loss.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.launcher import BURST, HALF, STEPS, Log, allowed, report_steps, table, train
from tests.training.test_masks import CP2, PER_TOKEN, SEGMENTED, TP2

PP2 = "--pipeline-model-parallel-size 2 --global-batch-size 8"
INTERLEAVED = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
HYBRID = "--hybrid-layer-pattern *-*-"
GATED = "--swiglu --disable-bias-linear"
EXPERTS = (
    "--num-experts 4 --moe-layer-freq 2 --moe-router-topk 2 --disable-bias-linear "
    "--moe-shared-expert-intermediate-size 96 --moe-grouped-gemm"
)
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
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
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"
KEEP = "--recompute-attention-fraction"
OFFLOAD, CHUNKS = "--recompute-offload", "--mlp-chunks 3"
# One by one: ranks, flags of both, of one alone.
ALONE = table(f"""\
offload, CP 2; 2; {CP2} {UNIFORM} 1 {KEEP} 0.5 {CHUNKS}; {OFFLOAD}
offload, by block; 1; {BLOCK} 1; {OFFLOAD}
offload, two layers a checkpoint; 1; {UNIFORM} 2 {KEEP} 0; {OFFLOAD}
offload, TP 2, spread over its ranks; 2; --tensor-model-parallel-size 2 \
--distribute-saved-activations {UNIFORM} 1; {OFFLOAD}
offload, evaluation; 1; {UNIFORM} 1 --eval-interval 2 --eval-iters 1 --split 90,10,0; {OFFLOAD}
MLPs, DP 2 with overlap; 2; {OVERLAP}; {CHUNKS}
MLPs, TP 2; 2; --tensor-model-parallel-size 2 {GATED}; {CHUNKS}
MLPs, biases, two layers a checkpoint; 1; {UNIFORM} 2; {CHUNKS}
attention; 1; ; {UNIFORM} 1 {KEEP} 0.5
attention, CP 2; 2; {CP2}; {UNIFORM} 1 {KEEP} 0.5
attention, all kept; 1; ; {UNIFORM} 1 {KEEP} 0.0
attention, all again; 1; ; {UNIFORM} 1 {KEEP} 1.0
attention, CP 2, all kept; 2; {CP2}; {UNIFORM} 1 {KEEP} 0.0
attention, 4 micro-batches; 1; --global-batch-size 8; {UNIFORM} 1 {KEEP} 0.5
attention, by block, bfloat16; 1; --bf16; {BLOCK} 1 {KEEP} 0.5
attention, two layers a checkpoint; 1; ; {UNIFORM} 2 {KEEP} 0.3
attention alone; 1; ; {SELECTIVE} {KEEP} 0.5
attention alone, CP 2; 2; {CP2}; {SELECTIVE} {KEEP} 0.0
attention, VPP, by block; 2; {INTERLEAVED}; {BLOCK} 1 {KEEP} 0.0
attention, VPP, CP 2; 4; {CP2} {INTERLEAVED}; {UNIFORM} 1 {KEEP} 0.5
attention, TP 2, CP 2; 4; {CP2} {TP2}; {UNIFORM} 1 {KEEP} 0.5
attention, CP 2, in segments; 2; {CP2} {SEGMENTED}; {UNIFORM} 1 {KEEP} 0.25
attention, CP 2, documents; 2; {CP2} --dataloader-inter-document-masking; {UNIFORM} 1 {KEEP} 0.5
attention alone, CP 2, windows; 2; {CP2} --window-size 20,0 --window-attn-skip-freq 2; \
{SELECTIVE} {KEEP} 0.5
attention, CP 2, evaluation; 2; {CP2} --split 90,10,0 --eval-iters 1 --eval-interval {HALF}; \
{UNIFORM} 1 {KEEP} 0.5
""")
# All at once: ranks, the fraction of attention that runs again, flags.
CASES = table(f"""\
CP 2, experts, a shared one; 2; 0.5; {CP2} {GATED} {EXPERTS}
CP 4, tied, biases; 4; 0; --context-parallel-size 4 --add-qkv-bias
one rank, MTP; 1; 0.5; --mtp-num-layers 1 {GATED}
CP 2, TP 2, MTP; 4; 0; {CP2} {TP2} --mtp-num-layers 1
PP 2, 4 micro-batches, untied; 2; 0.5; {PP2} --untie-embeddings-and-output-weights
PP 2, 4 micro-batches, CP 2, MTP; 4; 1; {PP2} {CP2} --mtp-num-layers 1
VPP, CP 2, documents; 4; 0.5; {INTERLEAVED} {CP2} {DOCUMENTS}
hybrid, CP 4, documents; 4; 0.5; --context-parallel-size 4 {HYBRID} {DOCUMENTS}
hybrid, TP 2, MTP; 2; 1; {TP2} {HYBRID}/*-
hybrid, PP 2; 2; 0; {PP2} --hybrid-layer-pattern *-|*-
hybrid, experts; 2; 0; {CP2} {EXPERTS.replace("--moe-layer-freq 2", "")} {GATED} \
--hybrid-layer-pattern *-*E
DP 2 with overlap, documents, experts; 2; 0.5; {DOCUMENTS} {GATED} {EXPERTS} {OVERLAP}
""") | {
    "Megatron-FSDP, CP 2 x DP 2, documents": (
        4,
        0.5,
        f"{FSDP} {CP2} {DOCUMENTS} --global-batch-size 8",
    ),
    "Megatron-FSDP, hybrid, MTP": (2, 0, f"{FSDP} {CP2} {HYBRID}/*-"),
    "Megatron-FSDP, TP 2": (4, 1, f"{FSDP} {TP2} {CP2}"),
}
EVERY = ALONE | {
    case: (ranks, flags, f"{SAVINGS} {fraction}")
    for case, (ranks, fraction, flags) in CASES.items()
}
FAST = {"offload, CP 2", "MLPs, DP 2 with overlap"}


@pytest.mark.parametrize("case", slow_if(EVERY.keys() - FAST, EVERY))
def test_losses_and_gradient_norms_equal_those_without(
    once: Callable[..., Log], data: tuple[str, ...], case: str
) -> None:
    ranks, flags, savings = EVERY[case]
    common = (ranks, *data, *BURST, PER_TOKEN, *flags.split())
    expected, found = once(*common), once(*common, *savings.split())
    assert ("chunked LM head loss: " in found.text) == ("--lm-head-loss" in savings)
    assert ("--mlp-chunks 3: " in found.text) == (CHUNKS in f"{flags} {savings}")
    assert "--mlp-chunks 3: 0 MLPs" not in found.text
    assert found.losses.keys() == expected.losses.keys() == set(STEPS)
    if case.startswith("attention"):
        uneven = savings.endswith("0.5") and CP2 in flags
        assert found.text.count("segmented-zigzag spreads them evenly") == uneven
    tolerance = 2**-8 if "--bf16" in flags else allowed(1e-5)
    report_steps(case, found, expected, tolerance)
    if savings == OFFLOAD:
        assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)


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
    report_steps("resumed without", without, expected, allowed(1e-5), steps=rest)


@pytest.mark.slow
def test_exceptions_leave_nothing_behind(tmp_path: Path, data: tuple[str, ...]) -> None:
    flags = (*data, *BURST, PER_TOKEN, *GATED.split(), *SAVINGS.split(), "0.5")
    expected = train(tmp_path / "whole", 1, *flags)
    module = "tests.training.exceptions_in_the_middle"
    found = train(tmp_path / "failing", 1, *flags, module=module)
    micro_batches = 2 * len(STEPS)
    assert f"failed: {4 * micro_batches} left: 0" in found.text
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
