"""Attention in chunks of its heads, one after the other: what lives meanwhile is one chunk's.

Heads know nothing of each other, so a plan serves every chunk. No byte more is sent, in messages
that are smaller; the same is computed, in more calls of the kernel.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.plans.choice.head_chunks import choose_head_chunks
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.profiling import span

logger = logging.getLogger(__name__)

_HEADS = {4: 2, 3: 1, 1: 0}  # which dimension they are of [B, S, H, D], [B, H, S] and [H]


def head_chunks(
    context: BurstContext, q: Tensor, k: Tensor, mask: Mask, *, has_latents: bool
) -> int:
    """Return into how many chunks these heads are cut; see `choose_head_chunks`."""
    chunks = choose_head_chunks(
        *(context.config, q.shape[0] * q.shape[1], q.shape[2], k.shape[2]),
        is_worth_it=q.is_cuda and context.grid.ranks > 1 and mask.documents is None,
        has_latents=has_latents,
    )
    if chunks > 1 and context.should_log(("head chunks", chunks)):
        logger.info("burst attention: --burst-head-chunks %d, one after the other", chunks)
    return chunks


def in_chunks(
    chunks: int, name: str, run: Callable[..., Sequence[Any]], *tensors: Tensor | None
) -> tuple[Any, ...]:
    """Return what the pass `run` makes of these tensors, a chunk of their heads at a time.

    What is None is given and returned as such; `name` is for profiles.
    """
    whole: list[Tensor | None] = []
    for n in range(chunks):
        with span(name):
            parts = run(*(_chunk(x, chunks, n) for x in tensors))
        if chunks == 1:
            return tuple(parts)
        if not whole:
            whole = [None if x is None else _room(x, chunks) for x in parts]
        for x, part in zip(whole, parts, strict=True):
            if x is not None:
                _of(x, chunks, n).copy_(part)
        del parts  # else they would live beside the next ones
    return tuple(whole)


def _chunk(x: Tensor | None, chunks: int, n: int) -> Tensor | None:
    """Return a chunk of the heads: a view of what is large, contiguous where kernels want it."""
    if x is None or chunks == 1:
        return x
    heads = _of(x, chunks, n)
    return heads if x.ndim == 4 else heads.contiguous()


def _of(x: Tensor, chunks: int, n: int) -> Tensor:
    return x.chunk(chunks, _HEADS[x.ndim])[n]


def _room(part: Tensor, chunks: int) -> Tensor:
    """Return an empty tensor for all chunks."""
    shape = [*part.shape]
    shape[_HEADS[part.ndim]] *= chunks
    return part.new_empty(shape)
