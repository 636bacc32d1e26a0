"""What ring_attention and its context refuse, each with the numbers that are wrong. (fast tier)"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, linear_cross_entropy, ring_attention
from megatron_burst.plans.visibility.layout import Layout
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
        (Q, KV.double(), KV, "q has torch.float32 on cpu, k has torch.float64 on cpu"),
        (Q, KV, KV.to("meta"), "q has torch.float32 on cpu, v has torch.float32 on meta"),
        (Q[:1], KV, KV, r"agree in batch.*q \(1, 4, 8, 16\), k \(2, 4, 2, 16\), v \(2, 4, 2, 16\)"),
        (Q, KV, KV[:, :2], r"agree in batch and tokens.*v \(2, 2, 2, 16\)"),
        (Q, KV, KV[:, :, :1], r"k and v in heads; .*k \(2, 4, 2, 16\), v \(2, 4, 1, 16\)"),
        (Q, KV[..., :8], KV, r"one head size; .*q \(2, 4, 8, 16\), k \(2, 4, 2, 8\)"),
        (Q[:, :, :3], KV, KV, r"multiple of kv heads; .*q \(2, 4, 3, 16\), k \(2, 4, 2, 16\)"),
        (Q, KV[:, :, :0], KV[:, :, :0], r"multiple of kv heads; .*k \(2, 4, 0, 16\)"),
        (Q, KV, KV[..., :0], r"head sizes must be at least 1; .*v \(2, 4, 2, 0\)"),
        (Q[:, :, :0], KV, KV, r"heads and head sizes must be at least 1; got q \(2, 4, 0, 16\)"),
        *[(Q.int(), KV.int(), KV.int(), r"no kernel can serve.*\n(.*\n)*  cpu: the dtype is tor")],
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_their_shapes(
    context: BurstContext, q: Tensor, k: Tensor, v: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ring_attention(q, k, v, context, mask=Mask.causal())


def test_a_layout_that_has_a_token_twice_is_refused(context: BurstContext) -> None:
    with pytest.raises(ValueError, match="each token to one rank"):
        layout = Layout(((range(3), range(2, 3)),))
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), layout=layout)


SINK = r"one score a query head, \[8\]; got "
WHERE_Q_IS = "floating-point tensor where q is, on cpu; got "


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *[
            ("softmax_scale", scale, f"softmax_scale must be finite, got {scale};")
            for scale in (math.nan, math.inf, -math.inf)
        ],
        *[
            ("soft_cap", cap, f"a soft cap is positive and finite, got {cap};")
            for cap in (0.0, -1.0, math.inf, math.nan)
        ],
        ("soft_cap", 30.0, r"no kernel can serve.*\n(.*\n)*  cpu: it has no soft cap"),
        ("sink", tensor(2), SINK + r"\(2,\)"),
        ("sink", tensor(1, 8), SINK + r"\(1, 8\)"),
        ("sink", tensor(8, dtype=torch.int64), WHERE_Q_IS + "torch.int64"),
        ("sink", tensor(8, device="meta"), WHERE_Q_IS + "torch.float32 on meta"),
    ],
)
def test_scores_that_cannot_be_are_refused(
    context: BurstContext, name: str, value: Any, message: str
) -> None:
    assert ring_attention(Q, KV, KV, context, mask=Mask.causal()).shape == Q.shape
    with pytest.raises(ValueError, match=message):
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), **{name: value})


@pytest.mark.parametrize("name", ["softmax_scale", "soft_cap"])
def test_a_learned_number_is_refused(context: BurstContext, name: str) -> None:
    number: Any = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match=f"{name} is a number, which gets no gradient, and got a"):
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), **{name: number})


@pytest.mark.parametrize("name", ["softmax_scale", "soft_cap"])
def test_a_number_may_be_a_tensor_and_change(name: str) -> None:
    context, number = BurstContext.create(BurstConfig(kernel="reference")), torch.tensor(0.0)
    q = torch.linspace(-1, 1, Q.numel()).view_as(Q).requires_grad_()
    k = q[:, :, :2].detach()
    for value in (0.5, 2.0):
        found = []
        for given in (number.fill_(value), value):
            options: Any = {name: given, "mask": Mask.causal()}
            out = ring_attention(q, k, k, context, **options)
            number.zero_()  # before the backward
            found.append((out, *torch.autograd.grad(out.square().sum(), q)))
        assert all(map(torch.equal, *found)), value


class Spread(torch.Tensor):
    """As a DTensor, of which a rank has a part."""

    def to_local(self) -> Tensor: ...


def test_dtensors_are_refused_before_anything_is_sent(context: BurstContext) -> None:
    with pytest.raises(TypeError, match="k is a DTensor: give k.to_local()"):
        ring_attention(Q, KV.as_subclass(Spread), KV, context, mask=Mask.causal())
    with pytest.raises(TypeError, match="weight is a DTensor: give .*; fully_shard gathers a"):
        linear_cross_entropy(KV, torch.ones(5, 16).as_subclass(Spread), KV[..., 0].long())
    with pytest.raises(TypeError, match="sink is a DTensor: give sink.to_local()"):
        sink = tensor(8).as_subclass(Spread)
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), sink=sink)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_batch_may_be_empty(kernel: str) -> None:
    context, q = BurstContext.create(BurstConfig(kernel=kernel)), Q[:0].clone().requires_grad_()
    ring_attention(q, KV[:0], KV[:0], context, mask=Mask.causal()).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


def test_what_is_no_context_no_mask_and_no_group_is_named(context: BurstContext) -> None:
    with pytest.raises(
        TypeError, match=r"mask must be a Mask, as Mask.causal\(\) is; got 'causal'"
    ):
        ring_attention(Q, KV, KV, context, mask="causal")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="context must be a BurstContext, as .* is; got None"):
        ring_attention(Q, KV, KV, None, mask=Mask.causal())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layout must be a Layout, as .* is; got \\[range"):
        layout: Any = [range(4)]
        ring_attention(Q, KV, KV, context, mask=Mask.causal(), layout=layout)
    of_layers = BurstContext.create(BurstConfig(block_mask="blocks.npy"))
    with pytest.raises(ValueError, match=r"'blocks.npy'\) is read by Megatron's layers"):
        ring_attention(Q, KV, KV, of_layers, mask=Mask.causal())
    other: Any
    for other in (dist.GroupMember.NON_GROUP_MEMBER, [0, 1]):
        with pytest.raises(TypeError, match=r"process group that this rank is in, as mesh.*; got "):
            BurstContext.create(BurstConfig(), other)
        with pytest.raises(TypeError, match=r"process group that this rank is in, as mesh.*; got "):
            linear_cross_entropy(Q[0, 0], Q[0, 0], Q[0, 0, :, 0].long(), group=other)


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
