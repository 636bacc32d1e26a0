"""Steps of Megatron's loop on real text equal the same run at CP = 1, step by step. (fast tier)

Always with --calculate-per-token-loss; the last test shows why.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tier import slow_if
from tests.training.launcher import (
    BURST,
    STEPS,
    Log,
    allowed,
    largest_difference,
    report,
    report_steps,
    table,
    train,
)

BFLOAT16_TOLERANCE = 2**-8  # half a unit in the last place of a bfloat16
PER_TOKEN = "--calculate-per-token-loss"
CP2 = "--context-parallel-size 2"
CP4 = "--context-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2 = "--pipeline-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

CASES = table(f"""\
CP 2; 2; {CP2}
CP 4, flat ring; 4; {CP4} --burst-topology flat
CP 8, mesh of 4 nodes x 2; 8; --context-parallel-size 8 --burst-topology mesh \
--burst-ranks-per-node 2
CP 4 as 2 x 2, kv backward, Megatron's groups; 4; \
{CP4} --burst-backward kv --hierarchical-context-parallel-sizes 2 2
CP 4 as 2 x 2, query backward; 4; {CP4} --burst-backward query --burst-ranks-per-node 2
TP 2 x CP 2 on 2 nodes, sequence parallel; 4; \
{CP2} {TP2} --sequence-parallel --burst-ranks-per-node 2
interleaved PP 2 x CP 2; 4; {CP2} {PP2} --num-layers-per-virtual-pipeline-stage 1
DP 2 x CP 2, distributed optimizer, overlap, query backward, full recompute; 4; \
{CP2} {OVERLAP} --burst-backward query {RECOMPUTE}
ring on 2 nodes; 4; {CP4} --context-parallel-algo ring --burst-topology double \
--burst-ranks-per-node 2
allgather; 4; {CP4} --context-parallel-algo allgather
ulysses; 4; {CP4} --context-parallel-algo ulysses
""")
SLOW = {  # the others have most of their features, several at once
    *("CP 2", "CP 4, flat ring"),
    "CP 8, mesh of 4 nodes x 2",
    "CP 4 as 2 x 2, kv backward, Megatron's groups",
    "CP 4 as 2 x 2, query backward",
    "interleaved PP 2 x CP 2",
    *("ring on 2 nodes", "allgather", "ulysses"),
}


@pytest.mark.parametrize("case", slow_if(SLOW, CASES))
def test_losses_and_gradient_norms_equal_those_of_one_rank(
    runs: Callable[..., Log], case: str
) -> None:
    ranks, flags = CASES[case]
    found = runs(ranks, PER_TOKEN, *flags.split())
    report_steps(case, found, runs(1, PER_TOKEN))


@pytest.mark.slow
def test_heads_that_auto_shares_out_equal_one_rank(runs: Callable[..., Log]) -> None:
    flags = "--context-parallel-size 4 --burst-ranks-per-node 2 --burst-head-parallel-size auto"
    found = runs(4, PER_TOKEN, *flags.split())
    said = r"--burst-head-parallel-size ([24]): .* heads over \1 ranks"
    assert re.search(said, found.text, re.DOTALL)
    report_steps(flags, found, runs(1, PER_TOKEN))


# A small learning rate keeps the experts' routing from tipping at a rounding.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--disable-bias-linear --lr 1e-4"
)


@pytest.mark.slow
def test_experts_equal_one_rank(once: Callable[..., Log], data: tuple[str, ...]) -> None:
    flags = (*data, *BURST, PER_TOKEN, *EXPERTS.split())
    flags += ("--group-query-attention", "--num-query-groups", "2")
    expected, found = once(1, *flags), once(2, *flags, *CP2.split())
    report_steps("MoE and GQA", found, expected)


def test_one_rank_equals_megatrons_own_attention(
    tmp_path: Path, runs: Callable[..., Log], start: tuple[str, ...]
) -> None:
    stock = train(tmp_path, 1, *start, PER_TOKEN)
    report_steps("stock", runs(1, PER_TOKEN), stock)


@pytest.mark.slow
def test_bfloat16_equals_one_rank_within_bfloat16(runs: Callable[..., Log]) -> None:
    expected = runs(1, PER_TOKEN, "--bf16")
    found = runs(2, PER_TOKEN, "--bf16", *CP2.split())
    difference = max(abs(found.losses[s] / expected.losses[s] - 1) for s in STEPS)
    report("bfloat16 loss", difference, BFLOAT16_TOLERANCE)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(
    tmp_path: Path, runs: Callable[..., Log], start: tuple[str, ...]
) -> None:
    first = runs(2, PER_TOKEN, *CP2.split())
    second = train(tmp_path, 2, *start, *BURST, PER_TOKEN, *CP2.split())
    assert (first.losses, first.grad_norms) == (second.losses, second.grad_norms)


@pytest.mark.slow
def test_unequal_loss_masks_need_per_token_loss(
    tmp_path: Path, short_documents: tuple[str, ...]
) -> None:
    """Without the flag Megatron averages the ranks' means, whatever the number of their tokens."""
    flags = (*short_documents, *BURST, "--eod-mask-loss", "--train-iters", "1")
    expected = train(tmp_path / "cp1", 1, *flags, PER_TOKEN)
    right = train(tmp_path / "right", 2, *flags, *CP2.split(), PER_TOKEN)
    wrong = train(tmp_path / "wrong", 2, *flags, *CP2.split())
    report_steps("per-token loss", right, expected, steps=range(1, 2))
    error = largest_difference(wrong, expected, [1])
    print(f"without --calculate-per-token-loss: {error:.1e}")
    assert error > 10 * allowed(1e-4)
