"""The FlashAttention-2 that is compiled into torch, for NVIDIA GPUs."""

from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.packed import InSequences, lengths_of
from megatron_burst.kernels.protocol import Gradients, KernelInput
from megatron_burst.kernels.requirements import DeclaredKernel


class AtenFlashKernel(InSequences, DeclaredKernel):
    """FlashAttention-2 through ATen; needs no package beside torch.

    Its backward asks torch itself whether it has to be deterministic.
    """

    name = "aten_flash"

    def _late_reasons(self) -> list[str]:
        there = torch.backends.cuda.is_flash_attention_available()
        return [] if there else ["this torch was built without FlashAttention"]

    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tile.qkv, *_lengths(tile), 0.0, tile.is_causal, False, **_settings(tile)
        )
        return out, lse

    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # Of dropout, which is 0.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=tile.q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(dout, *tile.qkv, out, lse),
            *_lengths(tile),
            0.0,
            tile.is_causal,
            rng_state,
            rng_state.new_empty(()),
            **_settings(tile),
        )
        return dq, dk, dv


def _lengths(tile: KernelInput) -> tuple[Any, ...]:
    """Return where packed queries and keys begin, and the longest of each."""
    if tile.packing is None:
        return None, None, tile.q.shape[1], tile.k.shape[1]
    return tuple(lengths_of(tile).values())


def _settings(tile: KernelInput) -> dict[str, Any]:
    left, right = tile.window
    return {"scale": tile.scale, "window_size_left": left, "window_size_right": right}
