"""What ring_attention and its context refuse, each with the numbers that are wrong. (fast tier)"""

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from tests.workers import Team, WorkerPool


@pytest.fixture
def context() -> BurstContext:
    return BurstContext.create(BurstConfig())


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Q, KV = tensor(2, 4, 8, 16), tensor(2, 4, 2, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (Q[0], KV, KV, r"q must be \[batch, tokens, heads, head size\], got \(4, 8, 16\)"),
        (Q, KV[None], KV, r"k must be .*, got \(1, 2, 4, 2, 16\)"),
        (Q, KV, KV[0], r"v must be .*, got \(4, 2, 16\)"),
        (Q, KV.double(), KV, "q has torch.float32 on cpu, k has torch.float64 on cpu"),
        (Q, KV, KV.bfloat16(), "q has torch.float32 on cpu, v has torch.bfloat16 on cpu"),
        (Q, KV, KV.to("meta"), "q has torch.float32 on cpu, v has torch.float32 on meta"),
        (Q[:1], KV, KV, r"agree in batch.*q \(1, 4, 8, 16\), k \(2, 4, 2, 16\), v \(2, 4, 2, 16\)"),
        (Q[:, :2], KV, KV, r"agree in batch and tokens.*q \(2, 2, 8, 16\), k \(2, 4, 2, 16\)"),
        (Q, KV, KV[:, :2], r"agree in batch and tokens.*v \(2, 2, 2, 16\)"),
        (Q, KV, KV[:, :, :1], r"k and v in heads; .*k \(2, 4, 2, 16\), v \(2, 4, 1, 16\)"),
        (Q, KV[..., :8], KV, r"one head size; .*q \(2, 4, 8, 16\), k \(2, 4, 2, 8\)"),
        (Q[:, :, :3], KV, KV, r"multiple of kv heads; .*q \(2, 4, 3, 16\), k \(2, 4, 2, 16\)"),
        (Q[:, :, :1], KV, KV, r"multiple of kv heads; .*q \(2, 4, 1, 16\)"),
        (Q, KV[:, :, :0], KV[:, :, :0], r"multiple of kv heads; .*k \(2, 4, 0, 16\)"),
        (Q, KV, KV[..., :8], r"no kernel can serve.*\n(.*\n)*  cpu: head sizes of K and V differ"),
        (
            Q.int(),
            KV.int(),
            KV.int(),
            r"no kernel can serve.*\n(.*\n)*  cpu: the dtype is torch.in",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_shapes(
    context: BurstContext, q: Tensor, k: Tensor, v: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ring_attention(q, k, v, context, mask=Mask.causal())


def test_tensors_that_fit_are_not_refused(context: BurstContext) -> None:
    assert ring_attention(Q, KV, KV, context, mask=Mask.causal()).shape == Q.shape


def test_value_heads_may_have_a_size_of_their_own_where_the_kernel_can() -> None:
    context = BurstContext.create(BurstConfig(kernel="reference"))
    out = ring_attention(Q, KV, KV[..., :6], context, mask=Mask.causal())
    assert out.shape == (2, 4, 8, 6)


def test_an_odd_number_of_tokens_is_refused(context: BurstContext) -> None:
    with pytest.raises(ValueError, match=r"divisible by 2 x 1 ranks = 2, got 3 tokens"):
        ring_attention(Q[:, :3], KV[:, :3], KV[:, :3], context, mask=Mask.causal())


def test_an_unknown_kernel_is_refused_when_the_context_is_made() -> None:
    with pytest.raises(ValueError, match="--burst-kernel flash9 is unknown; there are: auto, "):
        BurstContext.create(BurstConfig(kernel="flash9"))


def shard_of_wrong_length(team: Team) -> str:
    context = team.context(BurstConfig())
    try:
        context.shard(torch.zeros(2, 8), dim=1)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_sequence_that_does_not_divide_over_the_ranks_cannot_be_sharded(
    workers: WorkerPool,
) -> None:
    for text in workers.run(3, shard_of_wrong_length):
        assert text == (
            "zigzag needs a sequence divisible by 2 x 3 ranks = 6, got 8 tokens; "
            "change --seq-length or --context-parallel-size"
        )
