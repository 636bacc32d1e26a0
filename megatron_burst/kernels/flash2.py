"""FlashAttention-2 from the package flash-attn, for NVIDIA GPUs."""

from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import TileCall
from megatron_burst.kernels.requirements import DeclaredKernel, Requirements

# The signatures are those of 2.7.0 and later; Blackwell was refused before 2.7.4.
PACKAGE = Package("flash-attn", "flash_attn.flash_attn_interface", "2.7.4", "2.9")


class Flash2Kernel(DeclaredKernel):
    """flash-attn 2: windows, soft caps and a deterministic backward."""

    name = "flash2"
    requirements = Requirements(package=PACKAGE, soft_cap=True)

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        out, lse, *_ = PACKAGE.functions()._flash_attn_forward(
            *tile.qkv,
            dropout_p=0.0,
            causal=tile.is_causal,
            **settings(tile),
            alibi_slopes=None,
            return_softmax=False,
        )
        return out, lse

    def backward(
        self, tile: TileCall, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); see `Kernel`."""
        dq, dk, dv = (torch.empty_like(x) for x in tile.qkv)
        PACKAGE.functions()._flash_attn_backward(
            dout,
            *tile.qkv,
            out,
            lse.contiguous(),  # the kernel ignores its strides
            dq,
            dk,
            dv,
            dropout_p=0.0,
            causal=tile.is_causal,
            **settings(tile),
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def settings(tile: TileCall) -> dict[str, Any]:
    """Return what forward and backward of flash-attn 2 and 3 are told of a tile, by its name."""
    left, right = (-1 if limit is None else limit for limit in tile.window)
    return {
        "softmax_scale": tile.scale,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": tile.soft_cap or 0.0,
    }
