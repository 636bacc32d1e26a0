"""What ring_attention and its context refuse, each with the numbers that are wrong. (fast tier)"""

import math

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
        (Q[..., :0], KV[..., :0], KV, r"head sizes must be at least 1; .*k \(2, 4, 2, 0\)"),
        (Q, KV, KV[..., :0], r"head sizes must be at least 1; .*v \(2, 4, 2, 0\)"),
        (Q[:, :, :0], KV, KV, r"heads and head sizes must be at least 1; got q \(2, 4, 0, 16\)"),
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


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_value_heads_may_have_a_size_of_their_own(kernel: str) -> None:
    context = BurstContext.create(BurstConfig(kernel=kernel))
    out = ring_attention(Q, KV, KV[..., :6], context, mask=Mask.causal())
    assert out.shape == (2, 4, 8, 6)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_is_finite(context: BurstContext, scale: float) -> None:
    with pytest.raises(ValueError, match=f"softmax_scale must be finite, got {scale};"):
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), softmax_scale=scale)


def test_what_is_no_context_and_no_mask_is_named(context: BurstContext) -> None:
    with pytest.raises(
        TypeError, match=r"mask must be a Mask, as Mask.causal\(\) is; got 'causal'"
    ):
        ring_attention(Q, KV, KV, context, mask="causal")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="context must be a BurstContext, as .* is; got None"):
        ring_attention(Q, KV, KV, None, mask=Mask.causal())  # type: ignore[arg-type]


@pytest.mark.parametrize("soft_cap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_soft_cap_is_positive(context: BurstContext, soft_cap: float) -> None:
    with pytest.raises(ValueError, match=f"a soft cap is positive and finite, got {soft_cap};"):
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), soft_cap=soft_cap)


def test_a_soft_cap_without_a_kernel_for_it_is_refused(context: BurstContext) -> None:
    with pytest.raises(
        ValueError, match=r"no kernel can serve.*\n(.*\n)*  cpu: it has no soft cap"
    ):
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), soft_cap=30.0)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (tensor(2), r"one score a query head, \[8\]; got \(2,\)"),
        (tensor(1, 8), r"one score a query head, \[8\]; got \(1, 8\)"),
        (tensor(8, dtype=torch.int64), "floating-point tensor where q is, on cpu; got torch.int64"),
        (tensor(8, device="meta"), "where q is, on cpu; got torch.float32 on meta"),
    ],
)
def test_a_sink_has_a_score_for_every_query_head(
    context: BurstContext, sink: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), sink=sink)


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
