"""Megatron-FSDP trains as if no weight were sharded, and resumes at another CP size. (fast tier)"""

from pathlib import Path

import pytest

from tests.tier import is_thorough
from tests.training.launcher import BURST, report_steps, table, train

FSDP = """
    --use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor
    --data-parallel-sharding-strategy
""".split()
CP2 = ("--context-parallel-size", "2")
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
CHUNKED = "--lm-head-loss chunked --lm-head-chunk-size 100"
STEPS = range(1, 9 if is_thorough() else 4)
CASES = table(f"""\
gradients and optimizer sharded; 2; optim_grads; 
optimizer sharded; 2; optim; 
half of attention kept; 2; optim_grads_params; {RECOMPUTE} --recompute-attention-fraction 0.5
chunked loss; 2; optim_grads_params; {CHUNKED}
chunked loss, untied, CP 2 x DP 2; 4; optim_grads_params; \
{CHUNKED} --untie-embeddings-and-output-weights --global-batch-size 8
chunked loss, MTP; 2; optim_grads; {CHUNKED} --mtp-num-layers 1
chunked loss, a hybrid model; 2; optim_grads_params; \
{CHUNKED} --hybrid-layer-pattern *-*- --untie-embeddings-and-output-weights
MLPs in chunks; 2; optim_grads_params; {RECOMPUTE} --mlp-chunks 3
TP 2, sequence parallel; 4; optim_grads_params; {TENSOR}
a hybrid model; 2; optim_grads_params; --hybrid-layer-pattern *-*-
learnable sinks; 2; optim_grads_params; --softmax-type learnable
experts; 2; optim_grads_params; --num-experts 4 --moe-router-topk 2 \
--moe-router-load-balancing-type none --disable-bias-linear --lr 1e-4
""")


def flags_of(data: tuple[str, ...]) -> tuple[str, ...]:
    return (*data, *BURST, "--calculate-per-token-loss", "--train-iters", str(STEPS[-1]))


def test_sharded_weights_train_the_same_and_resume_on_one_rank(
    tmp_path: Path, data: tuple[str, ...]
) -> None:
    flags, fsdp = flags_of(data), (*FSDP, "optim_grads_params")
    expected = train(tmp_path / "cp1", 1, *flags)
    half = len(STEPS) // 2
    checkpoint = str(tmp_path / "checkpoint")
    # As one starts what may be restarted; where nothing is to be loaded Megatron takes a step.
    save = ("--save", checkpoint, "--load", checkpoint, "--save-interval", str(half))
    found = train(tmp_path / "fsdp", 2, *flags, *CP2, *fsdp, *save)
    report_steps("FSDP CP 2", found, expected, 1e-4, steps=STEPS)
    load = ("--load", checkpoint, "--ckpt-step", str(half))
    resumed = train(tmp_path / "resumed", 1, *flags, *fsdp, *load)
    assert sorted(resumed.losses) == list(STEPS[half:])
    report_steps("FSDP CP 2 -> CP 1", resumed, expected, 1e-4, steps=STEPS[half:])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_sharded_weights_train_the_same_with_other_features(
    tmp_path: Path, data: tuple[str, ...], case: str
) -> None:
    ranks, sharding, more = CASES[case]
    flags = (*flags_of(data), *CP2, *more.split())
    expected = train(tmp_path / "whole", ranks, *flags, "--use-distributed-optimizer")
    found = train(tmp_path / "fsdp", ranks, *flags, *FSDP, sharding)
    report_steps(f"FSDP, {case}", found, expected, 1e-4, steps=STEPS)
