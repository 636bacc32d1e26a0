"""A sink: a score that every query sees beside its keys, and that has no value."""

import torch
from torch import Tensor

from megatron_burst.attention.surrogate import row_products
from megatron_burst.kernels.dtypes import accumulation_dtype


def add_sink(out_BSHD: Tensor, lse_BHS: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out', lse') with the sink among the scores; out' is wide, as sums are.

    lse' = logaddexp(lse, sink), out' = out · exp(lse - lse'). A row that sees no key ends with
    lse' = sink and out' = 0; a sink of -inf is none.
    """
    wide = accumulation_dtype(out_BSHD.dtype)
    lse_BHS = lse_BHS.to(wide)
    with_sink_BHS = torch.logaddexp(lse_BHS, sink_H.to(wide)[:, None])
    factor_BHS = (lse_BHS - _finite_base(with_sink_BHS)).exp()
    return out_BSHD.to(wide) * factor_BHS.mT[..., None], with_sink_BHS


def sink_gradient(dout_BSHD: Tensor, out_BSHD: Tensor, lse_BHS: Tensor, sink_H: Tensor) -> Tensor:
    """Return -Σ exp(sink - lse') · delta over the batch and these tokens, in the sink's dtype.

    With delta = rowsum(dO ∘ O'): the sink is a key whose value is 0, so that its score's gradient
    is its weight times (0 - delta).
    """
    weights_BHS = (sink_H.to(lse_BHS.dtype)[:, None] - _finite_base(lse_BHS)).exp()
    delta_BHS = row_products(dout_BSHD, out_BSHD)
    return -(weights_BHS * delta_BHS).sum((0, 2)).to(sink_H.dtype)


def _finite_base(lse_BHS: Tensor) -> Tensor:
    # Subtract 0 where a row sees nothing, not even a sink, for -inf - -inf is NaN.
    return lse_BHS.masked_fill(lse_BHS.isneginf(), 0.0)
