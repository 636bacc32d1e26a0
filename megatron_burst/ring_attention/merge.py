"""Joins partial attention results of the same queries against different keys."""

import torch
from torch import Tensor

from megatron_burst.dtypes import accumulation_dtype
from megatron_burst.layout import Interval


class PartialResults:
    """The running (out, lse) of a rank's queries.

    Equals softmax over all keys seen so far: with m = logaddexp of the lse's,
    out = Σ exp(lse_i - m) out_i. Kept in float32 (float64 for float64 inputs), because a sum in
    bfloat16 would round once a tile.
    """

    def __init__(self, q: Tensor, value_head_dim: int) -> None:
        batch, tokens, heads, _ = q.shape
        self._dtype = q.dtype
        wide = accumulation_dtype(q.dtype)
        self._out_BSHD = q.new_zeros((batch, tokens, heads, value_head_dim), dtype=wide)
        self._lse_BHS = q.new_full((batch, heads, tokens), float("-inf"), dtype=wide)

    def add(self, rows: Interval, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Add the result of one tile to the queries in `rows`."""
        total_out, total_lse = self._out_BSHD[:, rows.rows], self._lse_BHS[:, :, rows.rows]
        merged = torch.logaddexp(total_lse, lse_BHS)
        # A row that has seen nothing stays at -inf; subtract 0 there, for -inf - -inf is NaN.
        base = merged.masked_fill(merged.isneginf(), 0.0)
        total_out.mul_(_per_row((total_lse - base).exp()))
        total_out.add_(_per_row((lse_BHS - base).exp()) * out_BSHD)
        total_lse.copy_(merged)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (out in the queries' dtype, lse)."""
        return self._out_BSHD.to(self._dtype), self._lse_BHS


def _per_row(x_BHS: Tensor) -> Tensor:
    return x_BHS.transpose(1, 2)[..., None]  # [B, S, H, 1]
