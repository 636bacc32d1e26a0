"""A stand-in for the attention output that stock backward kernels take as if it were the output."""

import torch
from torch import Tensor

from megatron_burst.dtypes import accumulation_dtype


def row_products(dout_BSHD: Tensor, out_BSHD: Tensor) -> Tensor:
    """Return delta = rowsum(dO ∘ O), [B, H, S] in float32 (float64 for float64)."""
    wide = accumulation_dtype(dout_BSHD.dtype)
    return (dout_BSHD.to(wide) * out_BSHD.to(wide)).sum(-1).transpose(1, 2).contiguous()


def stand_in_output(dout_BSHD: Tensor, delta_BHS: Tensor) -> Tensor:
    """Return the shortest O' with rowsum(dO ∘ O') = delta, in dO's dtype; 0 where dO is 0.

    O' = dO · delta / ‖dO‖². A backward uses the output for delta alone, so O need not travel.
    """
    wide = accumulation_dtype(dout_BSHD.dtype)
    dout = dout_BSHD.to(wide)
    # Divided by the row's largest value first, so that the squares of tiny gradients stay above 0.
    largest = dout.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    unit = dout / largest
    squares = unit.square().sum(-1, keepdim=True).clamp_min(1.0)  # 0 only where dO is; else >= 1
    factor = delta_BHS.transpose(1, 2)[..., None] / largest / squares
    return (unit * factor).to(dout_BSHD.dtype)
