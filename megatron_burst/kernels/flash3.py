"""FlashAttention-3 from the package flash_attn_3, for Hopper GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request, TileCall
from megatron_burst.kernels.requirements import Requirements

# Before 3.0.0 signatures changed while the version stayed 3.0.0b1.
PACKAGE = Package("flash_attn_3", "flash_attn_interface", "3.0.0", "3.1")


class Flash3Kernel:
    """flash-attn 3: windows, soft caps, a deterministic backward and MLA's usual head sizes."""

    name = "flash3"
    requirements = Requirements(package=PACKAGE, gpus=(9, 9), one_head_size=False, soft_cap=True)

    def reasons_against(self, request: Request) -> list[str]:
        """Return why flash-attn 3 cannot serve the request."""
        more = _head_size_reasons(request.head_dim, request.value_head_dim)
        return self.requirements.reasons_against(request, *more)

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        left, right = tile.window
        out, lse, *_ = PACKAGE.functions()._flash_attn_forward(
            *tile.qkv,
            softmax_scale=tile.scale,
            causal=tile.is_causal,
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
            softcap=tile.soft_cap or 0.0,
        )
        return out, lse

    def backward(
        self, tile: TileCall, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); see `Kernel`."""
        left, right = tile.window
        dq, dk, dv = (torch.empty_like(x) for x in tile.qkv)
        PACKAGE.functions()._flash_attn_backward(
            dout,
            *tile.qkv,
            out,
            lse.contiguous(),  # the kernel ignores its strides
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=tile.scale,
            is_causal=tile.is_causal,
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
            softcap=tile.soft_cap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _head_size_reasons(key_size: int, value_size: int) -> list[str]:
    reasons = []
    of_mla = 128 < key_size <= 192 and 96 < value_size <= 128
    if key_size != value_size and not of_mla:
        reasons.append(
            f"head sizes of K and V differ ({key_size} and {value_size}), and are not 136 to 192 "
            "and 104 to 128"
        )
    if max(key_size, value_size) > 192 and torch.are_deterministic_algorithms_enabled():
        reasons.append("its backward is not deterministic for head sizes above 192")
    return reasons
