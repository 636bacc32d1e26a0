"""torch FSDP2 trains as if no weight were sharded, with all that saves memory too. (slow)

Of local layers Megatron's FSDP2 leaves the output layer to the model's own group of weights; a
module of the tests shards it by itself, as Megatron does beside TransformerEngine's.
"""

from pathlib import Path

import pytest

from tests.training.launcher import BURST, allowed, report_steps, train

# Gradients of the size of roundings would tip the direction of a step of Adam.
UNTIED = "--untie-embeddings-and-output-weights --adam-eps 1e-6"
FSDP2 = f"--use-torch-fsdp2 --ckpt-format torch_dist {UNTIED}".split()
CHUNKED = "--lm-head-loss chunked --lm-head-chunk-size 100".split()
SAVINGS = """
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --mlp-chunks 3 --recompute-offload --recompute-attention-fraction 0.5
""".split()
CASES = {
    "DP 2": (2, ""),
    "CP 2 x DP 2, MTP": (4, "--context-parallel-size 2 --mtp-num-layers 1 --global-batch-size 8"),
    "CP 2, a hybrid model": (2, "--context-parallel-size 2 --hybrid-layer-pattern *-*-"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient_norms_equal_those_without(
    tmp_path: Path, data: tuple[str, ...], case: str
) -> None:
    ranks, more = CASES[case]
    flags = (*data, *BURST, *more.split())
    expected = train(tmp_path / "whole", ranks, *flags, *UNTIED.split())
    shards = "tests.training.fsdp2_output_layer"
    more = (*FSDP2, *CHUNKED, *SAVINGS)
    found = train(tmp_path / "chunked", ranks, *flags, *more, module=shards)
    assert "chunked LM head loss: " in found.text and "--mlp-chunks 3: " in found.text
    # Megatron's gradients of weights that FSDP2 shards are averaged in another order.
    report_steps(f"FSDP2, {case}", found, expected, 2 * allowed(1e-5))
