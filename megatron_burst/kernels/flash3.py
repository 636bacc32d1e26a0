"""FlashAttention-3 from the package flash_attn_3, for Hopper GPUs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_burst.kernels.flash2 import settings
from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request, TileCall
from megatron_burst.kernels.requirements import DeclaredKernel, Requirements

# Before 3.0.0 signatures changed while the version stayed 3.0.0b1.
PACKAGE = Package("flash_attn_3", "flash_attn_interface", "3.0.0", "3.1")


class Flash3Kernel(DeclaredKernel):
    """flash-attn 3: windows, soft caps, a deterministic backward and MLA's usual head sizes."""

    name = "flash3"
    requirements = Requirements(package=PACKAGE, gpus=(9, 9), one_head_size=False, soft_cap=True)

    def more_reasons(self, request: Request) -> Iterator[str]:
        """Yield what of the head sizes stands against flash-attn 3."""
        k, v = request.head_dim, request.value_head_dim
        if k != v and not (128 < k <= 192 and 96 < v <= 128):
            yield (
                f"head sizes of K and V differ ({k} and {v}), and are not 136 to 192 and 104 to 128"
            )
        if max(k, v) > 192 and torch.are_deterministic_algorithms_enabled():
            yield "its backward is not deterministic for head sizes above 192"

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        out, lse, *_ = PACKAGE.functions()._flash_attn_forward(
            *tile.qkv,
            causal=tile.is_causal,
            **settings(tile),
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
            dq=dq,
            dk=dk,
            dv=dv,
            is_causal=tile.is_causal,
            **settings(tile),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
