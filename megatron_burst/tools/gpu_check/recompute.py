"""Attention that runs twice: numbers, what is saved, copies to the host, leaks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megatron_burst.attention.autograd import ring_attention
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.saved import AttentionMemory, SavedRows
from megatron_burst.config import BurstConfig
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_most, relative_error
from megatron_burst.tools.one_rank import Sizes, Tensors
from megatron_burst.transport.host import HostMemory

REMEDY = "train without --recompute-offload, or without partial recompute"
_ERROR = 5e-3  # of the norm: what is recomputed may be rounded otherwise, once
_FRACTIONS = (0.0, 0.5, 1.0)  # one rank has two chunks
_CYCLES = 200_000_000  # that a GPU is kept busy, so that a copy may come too early

type _Results = tuple[list[Tensor], SavedRows | None]
type _Twice = Callable[[AttentionMemory | None], _Results]


def check(device: Device) -> Iterator[Check]:
    """Run calls twice as a checkpointed layer does, for all fractions, with and without offload."""
    sizes = Sizes(4096, 16, 4, 128) if device.is_gpu else Sizes(64, 4, 2, 16)
    context = BurstContext.create(BurstConfig())
    twice = partial(_both_passes, sizes.draw(device.device, DTYPE), context)
    expected, _ = twice(None)
    for fraction in _FRACTIONS:
        for host in (None, HostMemory()) if device.is_gpu else (None,):
            yield from _of_memory(device, twice, expected, AttentionMemory(fraction, host))
    if not device.is_gpu:
        yield Check("offload", "needs a GPU")


def _of_memory(
    device: Device, twice: _Twice, expected: Sequence[Tensor], memory: AttentionMemory
) -> Iterator[Check]:
    name = f"fraction {memory.fraction:g}" + (", offloaded" if memory.host else "")
    actual, saved = twice(memory)
    error = max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))
    yield at_most(f"{name}: error", error, _ERROR)
    assert saved is not None
    share, right = (
        sum(x.nbytes for x in saved.tensors) / sum(x.nbytes for x in expected[:2]),
        1 - memory.fraction,
    )
    yield Check(f"{name}: saved of the results", f"{share:.3f}", f"= {right:g}", share == right)
    if memory.host is not None and share:
        pinned = saved.tensors[0].is_pinned()
        yield Check(f"{name}: where", "pinned" if pinned else "not pinned", "pinned", pinned)
    del actual, saved
    left = device.left_behind(lambda: twice(memory))
    yield at_most(f"{name}: bytes left behind by two calls", left, 0, "{:.0f}")


def _both_passes(
    tensors: Tensors, context: BurstContext, memory: AttentionMemory | None
) -> _Results:
    """Return output, log-sum-exp and gradients of the second pass, and what the first has saved.

    Where that is offloaded the device has not computed the output when its copy is asked for, and
    what the first pass has freed is overwritten at once.
    """
    q, k, v, dout = tensors
    saved = None
    if memory is not None:
        with torch.no_grad():
            if memory.host:
                torch.cuda._sleep(_CYCLES)
            shape = ring_attention(q, k, v, context, mask=Mask.causal(), memory=memory).shape
            for _ in range(4 if memory.host else 0):
                q.new_full(shape, torch.nan)
        saved = memory.saved
        memory.fetch()
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = ring_attention(q, k, v, context, mask=Mask.causal(), memory=memory, return_lse=True)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)], saved
