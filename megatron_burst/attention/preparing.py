"""Prepares attention calls: plans, chooses a kernel, and keeps both for the calls to come."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.head_exchange import HeadExchange
from megatron_burst.attention.launches import launches_of, own_parts
from megatron_burst.attention.log import kind_of, log_choice
from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.attention.signature import CallSignature
from megatron_burst.attention.sums import WireDtypes
from megatron_burst.config import GradDtype
from megatron_burst.kernels import select_kernel
from megatron_burst.plans.choice.cost import LatentShape, Shape, room_pays
from megatron_burst.plans.choice.kv_or_latents import choose_kv
from megatron_burst.plans.choice.planning import Choice
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.gc_pause import without_gc
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.layout import Layout, boundary, first_saved_row
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.profiling import span


def prepare(
    context: BurstContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    soft_cap: float | None = None,
    memory: AttentionMemory | None = None,
    latents: LatentShape | None = None,
    layout: Layout | None = None,
) -> AttentionPlan:
    """Choose the kernel and the plans for these tensors; see `ring_attention`.

    Of two passes with one memory the first is whole, the second's forward stops early.
    """
    tensors = q.shape, k.shape, v.shape, q.dtype, q.device
    deterministic = torch.are_deterministic_algorithms_enabled()
    signature = CallSignature(*tensors, mask, soft_cap, latents, layout, deterministic)
    key = signature, scale, memory and (memory.fraction, memory.saved is not None)
    return context.kept.ready.recall(key, lambda: _for_pass(context, signature, scale, memory))


def head_exchange(
    context: BurstContext, local_tokens: int, layout: Layout | None = None
) -> HeadExchange:
    """Return the all-to-all of this rank's group, made once for a length or a layout."""

    def make() -> HeadExchange:
        group, index = context.heads.coordinates(context.rank)
        whole = context.layout_of(local_tokens * context.ranks, layout)
        messenger = context.communicator.subgroup(context.heads.groups[group])
        return HeadExchange(index, context.heads.member_layout(whole, group), messenger)

    return context.kept.exchanges.recall(layout or local_tokens, make)


def _for_pass(
    context: BurstContext, signature: CallSignature, scale: float, memory: AttentionMemory | None
) -> AttentionPlan:
    second = None if memory is None or memory.saved is None else memory.fraction
    whole, early = _call(context, signature), _call(context, _early(context, signature, second))
    plan, calls = early.forward_plan, early.forward_launches
    parts = {**whole.parts, **early.parts}
    call = replace(whole, forward_plan=plan, forward_launches=calls, parts=parts, scale=scale)
    call = replace(call, is_direct=whole.is_direct or early.is_direct)
    if memory is None:
        return call
    layout = context.layout_of(signature.q[1] * context.grid.ranks, signature.layout)
    stop, number = boundary(layout, memory.fraction), context.heads.coordinates(context.rank)[0]
    row = first_saved_row(context.heads.ring_layout(layout), number, stop)
    return replace(call, first_saved_row=row)


def _early(
    context: BurstContext, signature: CallSignature, fraction: float | None
) -> CallSignature:
    """Return what the forward of a second pass needs; `fraction` is None in any other."""
    if fraction is None:
        return signature
    layout = context.layout_of(signature.q[1] * context.grid.ranks, signature.layout)
    stop = boundary(layout, fraction)
    early = replace(signature.mask, query_stop=None if stop == layout.tokens else stop)
    return signature._replace(mask=early)


def _call(context: BurstContext, signature: CallSignature) -> AttentionPlan:
    """Return what was planned, or plan it."""

    def plan() -> AttentionPlan:
        with span("wait for the plan"):
            return _plan(context, signature)

    return context.kept.calls.recall(signature, plan)


@without_gc()
def _plan(context: BurstContext, signature: CallSignature) -> AttentionPlan:
    layout = context.layout_of(signature.q[1] * context.grid.ranks, signature.layout)
    mask = signature.mask
    tiling = Tiling(context.heads.ring_layout(layout), mask)
    choice, shape, instead = _choose(context, tiling, signature)
    if mask.query_stop is None:
        context.kept.means.add(mask, choice.forward[0].schedule.imbalance)
    sums_as = signature.dtype if context.config.grad_dtype is GradDtype.MODEL else None
    wire = WireDtypes(signature.dtype if shape.sends_raw else sums_as, sums_as)
    request = signature.request(is_banded=choice.is_banded)
    kernel = select_kernel(context.config.kernel, request)
    said = f"{choice}{instead}"
    if context.should_log((shape, *kind_of(mask))):
        log_choice(context.config, context.heads.size, context.grid, kernel, request, said, shape)
    number, index = context.heads.coordinates(context.rank)
    messenger = context.communicator
    if context.group is not None:
        messenger = messenger.subgroup(context.heads.ring(index))
    scale, plans = 1.0, choice.plans(number)  # `prepare` puts in each call's own scale
    forward, backward = launches_of(plans, signature.q[0], signature.device)
    return AttentionPlan(
        *(*plans, kernel, scale, messenger, wire, signature.soft_cap),
        sends_latents=shape.latents is not None,
        leaves_room=room_pays(tiling, shape, choice.forward[0].cost, context.machine),
        forward_launches=forward,
        backward_launches=backward,
        parts=own_parts(plans, signature.device),
        is_direct=choice.is_direct,
        moves_kv=any(Kind.KV in plan.moved for plan in plans),
        moves_queries=Kind.QUERY in plans[1].moved,
        choice=said,
        schedules=choice.names,
    )


def _choose(
    context: BurstContext, tiling: Tiling, signature: CallSignature
) -> tuple[Choice, Shape, str]:
    """Choose what travels and how; return for the log what does not."""
    config, shape = context.config, signature.shape(context.config.grad_dtype)
    links = Links.of(context.nodes, shape, context.machine, context.beside)
    return choose_kv(config, tiling, context.grid, links, signature.latents, context.memory_limit)
