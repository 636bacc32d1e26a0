"""Prepares attention calls: plans, chooses a kernel, and keeps both for the calls to come."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.head_exchange import HeadExchange
from megatron_burst.attention.kept import DocumentCalls
from megatron_burst.attention.launches import launches_of, own_parts
from megatron_burst.attention.log import kind_of, log_choice
from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.attention.signature import CallSignature
from megatron_burst.attention.sums import WireDtypes
from megatron_burst.config import GradDtype
from megatron_burst.kernels import select_kernel
from megatron_burst.plans.choice.cost import LatentShape, Shape, room_pays
from megatron_burst.plans.choice.kv_or_latents import choose_keys
from megatron_burst.plans.choice.planning import Choice, choose
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.gc_pause import without_gc
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.layout import Layout, boundary, first_saved_row
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.profiling import span

logger = logging.getLogger(__name__)

type Plans = dict[CallSignature, AttentionPlan]


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
    asked = CallSignature(*tensors, mask, soft_cap, latents, layout, deterministic)
    key = asked, scale, memory and (memory.fraction, memory.saved is not None)
    return context.kept.ready.recall(key, lambda: _for_pass(context, asked, scale, memory))


def plan_ahead(
    context: BurstContext,
    asked_before: DocumentCalls,
    tokens: int,
    mask_of: Callable[[Mask], Mask],
    layout: Layout | None,
) -> Plans:
    """Plan for other documents what these kinds of calls would ask for.

    For `adopt`. Until then calls see nothing of it, so a thread may plan while another one
    attends; all that changes is what was logged and the figures of `means`.

    Args:
        tokens: of the sequence; what was asked of other lengths is left out.
        mask_of: returns a mask with these documents, and the causality and window of another.
        layout: of the tokens; None is the configuration's.
    """
    plans: Plans = {}
    for kind, fraction in asked_before:
        if kind.q[1] * context.grid.ranks == tokens:
            whole = kind._replace(mask=mask_of(kind.mask), layout=layout)
            for asked in (whole, _early(context, whole, fraction)):
                plans[asked] = plans.get(asked) or _plan(context, asked)
    return plans


def adopt(context: BurstContext, plans: Plans) -> None:
    """Take over what was planned ahead."""
    for asked, call in plans.items():
        context.kept.calls.keep(asked, replace(call, is_ahead=True))


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
    context: BurstContext, asked: CallSignature, scale: float, memory: AttentionMemory | None
) -> AttentionPlan:
    second = None if memory is None or memory.saved is None else memory.fraction
    if asked.mask.documents is not None:
        context.kept.with_documents.keep((asked.kind, second), None)
    whole, early = _call(context, asked), _call(context, _early(context, asked, second))
    plan, calls = early.forward_plan, early.forward_launches
    parts = {**whole.parts, **early.parts}
    call = replace(whole, forward_plan=plan, forward_launches=calls, parts=parts, scale=scale)
    call = replace(call, is_ahead=whole.is_ahead and early.is_ahead)
    if memory is None:
        return call
    layout = context.layout_of(asked.q[1] * context.grid.ranks, asked.layout)
    stop, number = boundary(layout, memory.fraction), context.heads.coordinates(context.rank)[0]
    row = first_saved_row(context.heads.ring_layout(layout), number, stop)
    return replace(call, first_saved_row=row)


def _early(context: BurstContext, asked: CallSignature, fraction: float | None) -> CallSignature:
    """Return what the forward of a second pass needs; `fraction` is None in any other."""
    if fraction is None:
        return asked
    layout = context.layout_of(asked.q[1] * context.grid.ranks, asked.layout)
    stop = boundary(layout, fraction)
    early = replace(asked.mask, query_stop=None if stop == layout.tokens else stop)
    return asked._replace(mask=early)


def _call(context: BurstContext, asked: CallSignature) -> AttentionPlan:
    """Return what was planned, or plan it."""
    return context.kept.calls.recall(asked, lambda: _plan_now(context, asked))


def _plan_now(context: BurstContext, asked: CallSignature) -> AttentionPlan:
    begun = time.perf_counter()
    with span("wait for the plan"):
        call = _plan(context, asked)
    # What is asked for the first time has to be waited for, but not other documents.
    is_early = asked.mask.query_stop is not None  # where it stops moves with every micro-batch
    is_new = asked.mask.documents is None or context.should_log((asked.kind, is_early))
    if not is_new and not context.rank and context.should_log("a wait"):
        logger.info(
            "burst attention: waited %.0f ms for the plan of other documents, and does so "
            "wherever they are not known a micro-batch before",
            1e3 * (time.perf_counter() - begun),
        )
    return call


@without_gc()
def _plan(context: BurstContext, asked: CallSignature) -> AttentionPlan:
    layout, mask = context.layout_of(asked.q[1] * context.grid.ranks, asked.layout), asked.mask
    tiling = Tiling(context.heads.ring_layout(layout), mask)
    choice, shape, instead = _choose(context, tiling, asked)
    if mask.query_stop is None:
        context.kept.means.add(mask, choice.forward[0].schedule.imbalance)
    sums_as = asked.dtype if context.config.grad_dtype is GradDtype.MODEL else None
    wire = WireDtypes(asked.dtype if shape.sends_raw else sums_as, sums_as)
    request = asked.request(is_banded=choice.is_banded)
    kernel = select_kernel(context.config.kernel, request)
    said = f"{choice}{instead}"
    if context.should_log((shape, *kind_of(mask))):
        log_choice(context.config, context.heads.size, context.grid, kernel, request, said, shape)
    number, index = context.heads.coordinates(context.rank)
    messenger = context.communicator
    if context.group is not None:
        messenger = messenger.subgroup(context.heads.ring(index))
    scale, plans = 1.0, choice.plans(number)  # `prepare` puts in each call's own scale
    forward, backward = launches_of(plans, asked.q[0], asked.device)
    return AttentionPlan(
        *(*plans, kernel, scale, messenger, wire, asked.soft_cap),
        sends_latents=shape.latents is not None,
        leaves_room=room_pays(tiling, shape, choice.forward[0].cost, context.machine),
        forward_launches=forward,
        backward_launches=backward,
        parts=own_parts(plans, asked.device),
        choice=said,
    )


def _choose(
    context: BurstContext, tiling: Tiling, asked: CallSignature
) -> tuple[Choice, Shape, str]:
    """Choose what travels and how; return for the log what does not."""
    config = context.config
    shape = asked.shape(config.grad_dtype)
    links = Links.of(context.nodes, shape, context.machine, context.beside)

    def choose_for(shape: Shape) -> Choice:
        return choose(
            *(config, tiling, context.grid, shape, context.nodes, context.along_grid),
            memory_limit=context.memory_limit,
            links=links,
        )

    return choose_keys(choose_for, links, asked.latents, config)
