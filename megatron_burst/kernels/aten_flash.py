"""The FlashAttention-2 that is compiled into torch, for NVIDIA GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import TileCall
from megatron_burst.kernels.requirements import DeclaredKernel


class AtenFlashKernel(DeclaredKernel):
    """FlashAttention-2 through ATen; needs no package beside torch.

    Its backward asks torch itself whether it has to be deterministic.
    """

    name = "aten_flash"

    def late_reasons(self) -> list[str]:
        """Return why this torch has no FlashAttention."""
        there = torch.backends.cuda.is_flash_attention_available()
        return [] if there else ["this torch was built without FlashAttention"]

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        left, right = tile.window
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *tile.qkv,
            None,  # cumulative lengths of packed queries and keys
            None,
            tile.q.shape[1],
            tile.k.shape[1],
            0.0,
            tile.is_causal,
            False,
            scale=tile.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def backward(
        self, tile: TileCall, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); see `Kernel`."""
        # Of dropout, which is 0.
        rng_state = torch.zeros(2, dtype=torch.uint64, device=tile.q.device)
        left, right = tile.window
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            *tile.qkv,
            out,
            lse.contiguous(),  # the kernel ignores its strides
            None,  # cumulative lengths of packed queries and keys
            None,
            tile.q.shape[1],
            tile.k.shape[1],
            0.0,
            tile.is_causal,
            rng_state,
            rng_state.new_empty(()),
            scale=tile.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv
