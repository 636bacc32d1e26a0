"""Attention in chunks of its heads, one after the other: what lives meanwhile is one chunk's.

Heads know nothing of each other, so a plan serves every chunk. No byte more is sent, in messages
that are smaller; the same is computed, in more calls of the kernel.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_burst.attention.backward import backward
from megatron_burst.attention.call import AttentionCall
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.forward import forward
from megatron_burst.attention.keys import Keys
from megatron_burst.plans.head_chunks import choose_head_chunks
from megatron_burst.plans.mask import Mask
from megatron_burst.transport.profiling import span

logger = logging.getLogger(__name__)


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


def forward_in_chunks(
    chunks: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make_keys: Callable[[Tensor, Tensor], Keys],
    call: AttentionCall,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of all heads; see `forward`, which `call` is prepared for a chunk of."""
    found = []
    for n in range(chunks):
        q_n, k_n, v_n = (_chunk(x, chunks, n) for x in (q, k, v))
        sink_n = None if sink is None else _chunk(sink, chunks, n, 0)
        with span("forward"):
            found.append(forward(q_n, make_keys(k_n, v_n), call, sink_n))
    outs, lses = zip(*found, strict=True)
    return _join(outs, 2), _join(lses, 1)


def backward_in_chunks(
    chunks: int,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make_keys: Callable[[Tensor, Tensor], Keys],
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k and v of all heads, and the latent's of the one chunk."""
    found = []
    for n in range(chunks):
        dout_n, q_n, k_n, v_n, out_n = (_chunk(x, chunks, n) for x in (dout, q, k, v, out))
        keys, lse_n = make_keys(k_n, v_n), _chunk(lse, chunks, n, 1)
        with span("backward"):
            *gradients, dlatent = backward(dout_n, q_n, keys, out_n, lse_n, call)
        found.append(gradients)
    dq, dk, dv = (_join(parts, 2) for parts in zip(*found, strict=True))
    return dq, dk, dv, dlatent


def _chunk(x: Tensor, chunks: int, n: int, dim: int = 2) -> Tensor:
    """Return a chunk of the heads, contiguous as messages are."""
    return x if chunks == 1 else x.chunk(chunks, dim)[n].contiguous()


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
