"""Joins partial attention results of the same queries against different keys."""

import torch
from torch import Tensor

from megatron_burst.attention.sink import add_sink
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.plans.layout import Interval


class PartialResults:
    """The running (out, lse) of a rank's queries.

    Equals softmax over all keys seen so far: with m = logaddexp of the lse's,
    out = Σ exp(lse_i - m) out_i. Kept in float32 (float64 for float64 inputs), because a sum in
    bfloat16 would round once a tile. A row without a tile ends with out = 0 and lse = -inf.
    """

    def __init__(self, q: Tensor, value_head_dim: int) -> None:
        self._q = q
        self._shape = (*q.shape[:3], value_head_dim)
        self._totals: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Interval, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Add the result of one tile to the queries in `rows`; the tensors become ours."""
        if self._totals is None and rows.length == self._shape[1]:
            self._totals = out_BSHD, lse_BHS  # with one tile it stays at that
            return
        total_out_BSHD, total_lse_BHS = self._totals = self._wide_totals()
        total_out, total_lse = total_out_BSHD[:, rows.rows], total_lse_BHS[:, :, rows.rows]
        merged = torch.logaddexp(total_lse, lse_BHS)
        total_out.mul_(_per_row((total_lse - merged).exp()))
        total_out.addcmul_(_per_row((lse_BHS - merged).exp()), out_BSHD)
        total_lse.copy_(merged)

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out in the queries' dtype, lse), each head's sink among the scores."""
        out_BSHD, lse_BHS = self._totals or self._wide_totals()
        if sink is not None:
            out_BSHD, lse_BHS = add_sink(out_BSHD, lse_BHS, sink)
        return out_BSHD.to(self._q.dtype), lse_BHS

    def _wide_totals(self) -> tuple[Tensor, Tensor]:
        """Return the totals in the dtype of sums, made of nothing if there are none yet."""
        wide = accumulation_dtype(self._q.dtype)
        if self._totals is not None:
            out_BSHD, lse_BHS = self._totals
            return out_BSHD.to(wide), lse_BHS.to(wide)
        batch, tokens, heads, _ = self._shape
        lse_BHS = self._q.new_full((batch, heads, tokens), float("-inf"), dtype=wide)
        return self._q.new_zeros(self._shape, dtype=wide), lse_BHS


def _per_row(x_BHS: Tensor) -> Tensor:
    return x_BHS.transpose(1, 2)[..., None]  # [B, S, H, 1]
