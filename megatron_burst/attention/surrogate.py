"""A surrogate of the attention output that stock backward kernels take as if it were the output."""

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.in_triton import triton_kernels


def row_products(dout_BSHD: Tensor, out_BSHD: Tensor) -> Tensor:
    """Return delta = rowsum(dO ∘ O), [B, H, S] in float32 (float64 for float64)."""
    if (fused := _in_triton(dout_BSHD, out_BSHD, over_squares=False)) is not None:
        return fused
    wide = accumulation_dtype(dout_BSHD.dtype)
    return (dout_BSHD.to(wide) * out_BSHD.to(wide)).sum(-1).transpose(1, 2).contiguous()


def surrogate_factor(dout_BSHD: Tensor, out_BSHD: Tensor) -> Tensor:
    """Return delta / ‖dO‖², [B, H, S] in float32 (float64 for float64); 0 where dO is 0.

    What is sent with a query block in the place of its output: see `surrogate_output`.
    """
    if (fused := _in_triton(dout_BSHD, out_BSHD, over_squares=True)) is not None:
        return fused
    wide = accumulation_dtype(dout_BSHD.dtype)
    delta_BHS = row_products(dout_BSHD, out_BSHD)
    # Divided by the row's largest value first, so that the squares of tiny gradients stay above 0.
    largest_BSH1 = dout_BSHD.abs().amax(-1, keepdim=True).to(wide)
    largest_BSH1 = torch.where(largest_BSH1 > 0, largest_BSH1, torch.ones_like(largest_BSH1))
    squares_BSH1 = (dout_BSHD / largest_BSH1).square().sum(-1, keepdim=True)
    squares_BSH1 = squares_BSH1.clamp_min(1.0)  # 0 only where dO is; else >= 1
    largest_BHS, squares_BHS = (x.squeeze(-1).mT for x in (largest_BSH1, squares_BSH1))
    factor_BHS = delta_BHS / largest_BHS / squares_BHS / largest_BHS
    # Of subnormal gradients it may not fit the dtype; they are as good as 0.
    bound = torch.finfo(wide).max
    return factor_BHS.clamp(-bound, bound).contiguous()


def surrogate_output(dout_BSHD: Tensor, factor_BHS: Tensor) -> Tensor:
    """Return the shortest O' with rowsum(dO ∘ O') = delta, in dO's dtype: dO · delta / ‖dO‖².

    A backward uses the output for delta alone, so O need not be sent. Where dO and the factor are
    normal numbers, O' is rounded as dO's dtype is; beyond, its delta is off by at most |delta|.
    """
    if (fused := triton_kernels(dout_BSHD)) is not None:
        surrogate_BSHD = torch.empty_like(dout_BSHD)
        fused.scale_rows(surrogate_BSHD, dout_BSHD, factor_BHS)
        return surrogate_BSHD
    return (dout_BSHD * factor_BHS.mT[..., None]).to(dout_BSHD.dtype)


def _in_triton(dout_BSHD: Tensor, out_BSHD: Tensor, *, over_squares: bool) -> Tensor | None:
    """Return a number a row by the fused kernel; None where plain torch is to make it."""
    if (fused := triton_kernels(dout_BSHD)) is None:
        return None
    batch, tokens, heads, _ = dout_BSHD.shape
    result_BHS = dout_BSHD.new_empty((batch, heads, tokens), dtype=torch.float32)
    fused.row_products(result_BHS, dout_BSHD, out_BSHD, over_squares)
    return result_BHS
