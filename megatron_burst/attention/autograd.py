"""The public function: checks its input and joins the forward and backward loops for autograd."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.attention.call import AttentionPlan, Prepared
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.head_chunks import head_chunks, in_chunks
from megatron_burst.attention.inputs import (
    check_alike,
    check_context,
    check_mask,
    check_scores,
    check_shapes,
)
from megatron_burst.attention.kv import ExpandedLatents, KeysAndValues, Latents
from megatron_burst.attention.passes import backward, forward
from megatron_burst.attention.preparing import head_exchange
from megatron_burst.attention.preparing import prepare as prepare_call
from megatron_burst.attention.saved import AttentionMemory, is_selective
from megatron_burst.attention.signature import Given, KindOfTensor
from megatron_burst.attention.sink import sink_gradient
from megatron_burst.kernels.dtypes import as_autocast, without_autocast
from megatron_burst.kernels.inputs import as_number
from megatron_burst.kernels.uncompiled import uncompiled
from megatron_burst.plans.choice.head_parallel import kv_head_copies
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.lowered import Block
from megatron_burst.transport.memory import side_by_side


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
    latents: Latents | None = None,
    layout: Layout | None = None,
    memory: AttentionMemory | None = None,
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
    soft_cap: float | None = None,
    sink: Tensor | None = None,
    latents: Latents | None = None,
    layout: Layout | None = None,
    memory: AttentionMemory | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@uncompiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
    latents: Latents | None = None,
    layout: Layout | None = None,
    memory: AttentionMemory | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the whole sequence, each rank holding the tokens of its shard.

    Equals, on every rank of the context's group,

        whole = [context.unshard(x, dim=1) for x in (q, k, v)]
        out = context.shard(softmax(scale · q kᵀ + mask) v, dim=1)

    (a soft cap changes the scores before the mask, a sink the sum under the softmax: see below),
    without ever holding more than a few ranks' K and V, on a ring two or three others'; `allgather`
    holds all, and a mesh as much as `--burst-memory-mb` allows. Bytes: docs/budgets.md.
    Shapes, dtype and mask may change from call to call, on all ranks together. Under torch.autocast
    all is cast to its dtype, as for the products above.

    Args:
        q: [batch, local tokens, query heads, head size].
        k: [batch, local tokens, kv heads, head size]; the query heads are a multiple of these.
        v: [batch, local tokens, kv heads, value head size].
        context: made once by `BurstContext.create` on all ranks of the group.
        mask: `Mask.causal()` or `Mask.full()`.
        softmax_scale: any finite number; 1/√(head size) if None.
        soft_cap: scores become soft_cap · tanh(scores / soft_cap) after the scale, before the mask.
        sink: [query heads], one score a head that every query of the sequence sees beside its keys
            and that has no value: softmax's denominator grows by exp(sink). Its gradient on a rank
            is the part of the rank's own tokens; like that of any parameter it is summed or
            averaged over the group, which Megatron's all-reduce over CP x DP does. Zeros without a
            gradient are the off-by-one softmax.
        latents: what k and v were made of by autograd, in multi-latent attention. They travel
            where `BurstConfig.mla` says so: then the gradients that k and v get are those of this
            rank's tiles alone, and those of the other ranks' come by the latents. In the dtype of
            k and v.
        layout: which tokens each rank holds; None is the configuration's layout. It may change with
            every micro-batch; then `context.shard` above is that of this layout.
        memory: for a call that runs twice, as in a checkpointed layer. Into an empty one the call
            puts the results of the late rows; with a full one it takes them out and computes only
            the early rows, its messages cut to what those need.
        return_lse: also return the log-sum-exp of every row's scores.

    Returns:
        out, [batch, local tokens, query heads, value head size] in q's dtype; with `return_lse`
        also lse, [batch, query heads, local tokens], natural logarithm, float32 (float64 for
        float64 inputs), the sink included, without a gradient.

    Raises:
        ValueError: shapes or dtypes do not fit, the soft cap is not positive, the scale not finite,
            no kernel can serve them, or another rank was asked for something else, takes another
            plan or kernel, or cannot: see docs/troubleshooting.md.
        TypeError: the context, the mask or the layout is none, a tensor a DTensor, or a number a
            tensor that asks for a gradient.
        CommunicationError: a peer died or took longer than the time limit, or an earlier call of
            this context failed.
    """
    check_context(context)
    with context.agreed.told("attention"):
        check_mask(mask, layout, context.config.block_mask)
        if memory is not None and is_selective():
            raise ValueError(
                "a second pass with a memory calls kernels less often, and a selective checkpoint "
                "tells their results apart by their order: take one of them"
            )
        softmax_scale = as_number("softmax_scale", softmax_scale)
        soft_cap = as_number("soft_cap", soft_cap)
        q, k, v = as_autocast(q, k, v)
        latents = None if latents is None else latents.in_autocast()
        # A head size of 0 is refused below, on all ranks together.
        scale = max(q.shape[-1], 1) ** -0.5 if softmax_scale is None else softmax_scale
        wants = (x is not None and x.requires_grad for x in (q, k, v, sink))
        given = Given(
            *(_kind(q), _kind(k), _kind(v), None if sink is None else _kind(sink)),
            None if latents is None else (_kind(latents.latent), _kind(latents.weight)),
            *(mask, scale, soft_cap, layout),
            None if memory is None else (memory.fraction, memory.saved is not None),
            return_lse,
            torch.is_grad_enabled() and any(wants),
            torch.are_deterministic_algorithms_enabled(),
        )

    def prepare() -> Prepared:
        check_alike(q=q, k=k, v=v)
        check_shapes(q, k, v)
        check_scores(q, scale, soft_cap, sink)
        return _prepare(q, k, v, context, given, latents, memory)

    prepared = context.agreed(given, prepare)
    call, exchange = prepared.call, prepared.exchange
    if scale <= 0:  # kernels hide a score by -inf before they scale it; see `_prepare`
        q = -q if scale else 0 * q
    if exchange is not None:
        if prepared.copies > 1:
            k, v = (x.repeat_interleave(prepared.copies, dim=2) for x in (k, v))
        if sink is not None:
            sink = sink.chunk(exchange.ranks)[exchange.rank]  # as the query heads are
        q, k, v = exchange.to_heads(q, k, v)
    made_of = latents if call.sends_latents else None
    latent = (None, None) if made_of is None else made_of.differentiable
    add = None if made_of is None else made_of.add_weight_gradient
    out, lse = _RingAttention.apply(q, k, v, *latent, sink, prepared.chunks, call, memory, add)
    if exchange is None:
        return (out, lse) if return_lse else out
    if not return_lse:
        return exchange.to_tokens(out)[0]
    (lse_BSH1,) = exchange.to_tokens(lse.transpose(1, 2)[..., None])
    return exchange.to_tokens(out)[0], lse_BSH1[..., 0].transpose(1, 2)


def _kind(x: Tensor) -> KindOfTensor:
    return x.shape, x.dtype, x.device


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    given: Given,
    latents: Latents | None,
    memory: AttentionMemory | None,
) -> Prepared:
    exchange, copies, travelling = None, 1, None
    if latents is not None:
        shape = latents.shape(k, v)  # whether they can travel or not, they have to fit
        travelling = shape if context.can_send_latents else None
    if context.heads.size > 1:
        exchange = head_exchange(context, q.shape[1], given.layout)
        copies = kv_head_copies(q.shape[2], k.shape[2], exchange.ranks)
        q, k, v = (
            _as_exchanged(x, n, exchange.ranks) for x, n in ((q, 1), (k, copies), (v, copies))
        )
    chunks = head_chunks(context, q, k, given.mask, has_latents=travelling is not None)
    q, k, v = (x[:, :, : x.shape[2] // chunks] for x in (q, k, v))
    sent = travelling if chunks == 1 else None
    settings = given.mask, abs(given.scale) or 1.0, given.soft_cap, memory, sent, given.layout
    return Prepared(prepare_call(context, q, k, v, *settings), chunks, exchange, copies)


def _as_exchanged(x: Tensor, copies: int, ranks: int) -> Tensor:
    """Return a tensor of the shape that `to_heads` gives, which takes no memory."""
    batch, tokens, heads, size = x.shape
    return x.new_empty(()).expand(batch, tokens * ranks, heads * copies // ranks, size)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        latent: Tensor | None,
        weight: Tensor | None,
        sink: Tensor | None,
        chunks: int,
        call: AttentionPlan,
        memory: AttentionMemory | None,
        add_weight_gradient: Callable[[Tensor], object] | None,
    ) -> tuple[Tensor, Tensor]:
        def one_chunk(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Block:
            return forward(q, _kv(latent, weight, call, k, v), call, sink)

        with call.communicator.in_pass("forward"):
            if call.moves_kv and latent is None and chunks == 1:
                k, v = side_by_side((k, v))  # as they travel, in both passes
            q, k, v = (x.contiguous() for x in (q, k, v))  # for the kernels' sake
            out, lse = in_chunks(chunks, "forward", one_chunk, q, k, v, sink)
        if memory is not None:
            if saved := memory.recall():
                saved.put(out, lse)
            else:
                memory.save(call.first_saved_row, out, lse)
        ctx.save_for_backward(q, k, v, latent, weight, sink, out, lse)
        ctx.chunks, ctx.call, ctx.add_weight_gradient = chunks, call, add_weight_gradient
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @uncompiled
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, latent, weight, sink, out, lse = ctx.saved_tensors
        call: AttentionPlan = ctx.call
        add = ctx.add_weight_gradient

        def one_chunk(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
        ) -> tuple[Tensor | None, ...]:
            wants_weight = add is not None or ctx.needs_input_grad[4]
            kv = _kv(latent, weight, call, k, v, wants_weight)
            return *backward(dout, q, kv, out, lse, call), kv.weight_gradient

        with call.communicator.in_pass("backward"):
            dout = dout.contiguous()
            dsink = sink_gradient(dout, out, lse, sink) if ctx.needs_input_grad[5] else None
            grads = in_chunks(ctx.chunks, "backward", one_chunk, dout, q, k, v, out, lse)
        *gradients, dweight = grads
        if dweight is not None and add is not None:
            add(dweight)
            dweight = None
        return *gradients, dweight, dsink, None, None, None, None


def _kv(
    latent: Tensor | None,
    weight: Tensor | None,
    call: AttentionPlan,
    k: Tensor,
    v: Tensor,
    differentiates_weight: bool = False,
) -> KeysAndValues:
    rank = call.forward_plan.rank
    if latent is None or weight is None:
        return KeysAndValues(rank, k, v)
    return ExpandedLatents(rank, k, v, latent, weight, differentiates_weight)
