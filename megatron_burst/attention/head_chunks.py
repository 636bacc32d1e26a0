"""Attention in chunks of its heads, one after the other: what lives meanwhile is one chunk's.

Heads know nothing of each other, so a plan serves every chunk. No byte more is sent, in messages
that are smaller; the same is computed, in more calls of the kernel.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.plans.head_chunks import choose_head_chunks
from megatron_burst.plans.mask import Mask
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
    if chunks > 1 and context.is_news(("head chunks", chunks)):
        logger.info("burst attention: --burst-head-chunks %d, one after the other", chunks)
    return chunks


def in_chunks(
    chunks: int, name: str, run: Callable[..., Sequence[Any]], *tensors: Tensor | None
) -> tuple[Any, ...]:
    """Return what the pass `run` makes of these tensors, a chunk of their heads at a time.

    What is None is given and returned as such; `name` is for profiles.
    """
    found = []
    for n in range(chunks):
        with span(name):
            found.append(run(*(_chunk(x, chunks, n) for x in tensors)))
    return tuple(_join(parts) for parts in zip(*found, strict=True))


def _chunk(x: Tensor | None, chunks: int, n: int) -> Tensor | None:
    """Return a chunk of the heads, contiguous as messages are."""
    if x is None or chunks == 1:
        return x
    return x.chunk(chunks, _HEADS[x.ndim])[n].contiguous()


def _join(parts: Sequence[Tensor]) -> Tensor:  # or None
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    return torch.cat(list(parts), _HEADS[parts[0].ndim])
