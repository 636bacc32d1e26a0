"""The public function: checks its input and joins the forward and backward loops for autograd."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.config import Algorithm
from megatron_burst.context import AttentionCall, BurstContext
from megatron_burst.mask import Mask
from megatron_burst.ring_attention.backward import backward
from megatron_burst.ring_attention.forward import forward
from megatron_burst.ring_attention.head_exchange import HeadExchange


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the whole sequence, each rank holding the tokens of its shard.

    Equals, on every rank of the context's group,

        whole = [context.unshard(x, dim=1) for x in (q, k, v)]
        out = context.shard(softmax(scale · q kᵀ + mask) v, dim=1)

    without ever holding more than a few ranks' K and V: its own, those in use, those arriving (two
    more on a flat ring, four on a double ring; `allgather` holds all).
    Shapes, dtype and mask may change from call to call, on all ranks together.

    Args:
        q: [batch, local tokens, query heads, head size].
        k: [batch, local tokens, kv heads, head size]; the query heads are a multiple of these.
        v: [batch, local tokens, kv heads, value head size].
        context: made once by `BurstContext.create` on all ranks of the group.
        mask: `Mask.causal()` or `Mask.full()`.
        softmax_scale: 1/√(head size) if None.
        return_lse: also return the log-sum-exp of every row's scores.

    Returns:
        out, [batch, local tokens, query heads, value head size] in q's dtype; with `return_lse`
        also lse, [batch, query heads, local tokens], natural logarithm, float32 (float64 for
        float64 inputs), without a gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, or no kernel can serve them.
        CommunicationError: a peer died or took longer than the time limit.
    """
    _check_tensors(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if context.config.algorithm is Algorithm.ULYSSES and context.ranks > 1:
        out, lse = _over_heads(q, k, v, context, mask, scale, return_lse)
    else:
        out, lse = _RingAttention.apply(q, k, v, context.prepare(q, k, v, mask, scale))
    return (out, lse) if return_lse else out


def _over_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    mask: Mask,
    scale: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    layout = context.layout(q.shape[1] * context.ranks)
    exchange = HeadExchange(context.rank, context.ranks, context.communicator)
    q, k, v = (exchange.to_heads(x, layout) for x in (q, k, v))
    out, lse = _RingAttention.apply(q, k, v, context.prepare(q, k, v, mask, scale))
    if return_lse:
        lse = exchange.to_tokens(lse.transpose(1, 2)[..., None], layout)[..., 0].transpose(1, 2)
    return exchange.to_tokens(out, layout), lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))  # messages are; q for the kernels' sake
        out, lse = forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(dout.contiguous(), q, k, v, out, lse, ctx.call), None


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be [batch, tokens, heads, head size], got {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device; q has {q.dtype} on {q.device}, "
                f"{name} has {x.dtype} on {x.device}"
            )
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"q, k and v must agree in batch and tokens, k and v in heads; {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have one head size; {shapes}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of kv heads; {shapes}")
