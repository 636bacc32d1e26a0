"""Joins partial attention results of the same queries against different keys."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_burst.attention.rows import Parts, Rows, rows_of, views_of, write_rows
from megatron_burst.attention.sink import add_sink
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.in_triton import triton_kernels
from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Item, Kind, Send
from megatron_burst.transport.comm import Block


class PartialOutputs:
    """What a rank has of outputs: of its own queries, and of those that visit it."""

    def __init__(self, rank: int, q: Tensor, value_head_dim: int) -> None:
        self._q, self._value_head_dim = q, value_head_dim
        self._own = Item(Kind.OUTPUT, rank)
        self._results: dict[Item, PartialResults] = {}

    def template(self, item: Item) -> Block:
        """Return tensors without storage of the shapes and dtypes in which an output arrives."""
        (q,) = rows_of((self._q,), item.packed)
        batch, tokens, heads, _ = q.shape
        lse = q.new_empty((1,), dtype=accumulation_dtype(q.dtype)).expand(batch, heads, tokens)
        return q.new_empty((1,)).expand(batch, tokens, heads, self._value_head_dim), lse

    def add(self, item: Item, rows: Rows, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Add a kernel call's results to these rows of the item; the tensors become ours."""
        self._of(item).add(rows, out_BSHD, lse_BHS)

    def make_room(self, item: Item) -> None:
        """Widen a first result before a second one is computed, not while it waits to be added."""
        if item in self._results:
            self._results[item].widen()

    def take(self, item: Item, block: Block, parts: Parts) -> None:
        """Add what has arrived; it is not looked at again."""
        rows: Rows = Interval(0, block[0].shape[1])
        if item.owner == self._own.owner and item.part:
            rows, item = parts[item.part], self._own
        self._of(item).merge(rows, *block)

    def hand_on(self, sends: Iterable[Send]) -> dict[Item, Block]:
        """Return, as they are sent, the outputs among `sends`; they start anew.

        Rounded once to the queries' dtype; the log-sum-exp stays wide.
        """
        items = [send.item for send in sends if send.item.kind.is_result]
        results = {item: self._results.pop(item).finish() for item in items}
        return {item: (out.contiguous(), lse.contiguous()) for item, (out, lse) in results.items()}

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the rank's own queries, each head's sink among the scores."""
        return self._of(self._own).finish(sink)

    def _of(self, item: Item) -> "PartialResults":
        if item not in self._results:
            (q,) = rows_of((self._q,), item.packed)
            self._results[item] = PartialResults(q, self._value_head_dim)
        return self._results[item]


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

    def add(self, rows: Rows, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Add the results of one kernel call to these queries; the tensors become ours."""
        if self._totals is None and rows == Interval(0, self._shape[1]):
            self._totals = out_BSHD, lse_BHS  # with one call it stays at that
            return
        self.merge(rows, out_BSHD, lse_BHS)

    def merge(self, rows: Rows, out_BSHD: Tensor, lse_BHS: Tensor) -> None:
        """Add results in which rows may have seen nothing; the tensors stay the caller's."""
        totals = self.widen()
        if (fused := triton_kernels(out_BSHD)) is not None:
            views, index = views_of(totals, rows)
            fused.merge(*views, out_BSHD, lse_BHS, index)
            return
        total_out, total_lse = some = rows_of(totals, rows)
        merged = torch.logaddexp(total_lse, lse_BHS)
        finite = merged.clamp_min(torch.finfo(merged.dtype).min)  # -inf - -inf would be NaN
        total_out.mul_((total_lse - finite).exp().mT[..., None])  # [B, S, H, 1]
        total_out.addcmul_((lse_BHS - finite).exp().mT[..., None], out_BSHD)
        total_lse.copy_(merged)
        write_rows(totals, rows, some)

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out in the queries' dtype, lse), each head's sink among the scores."""
        out_BSHD, lse_BHS = self._totals or self.widen()
        if sink is not None:
            out_BSHD, lse_BHS = add_sink(out_BSHD, lse_BHS, sink)
        return out_BSHD.to(self._q.dtype), lse_BHS

    def widen(self) -> tuple[Tensor, Tensor]:
        """Bring the totals into the dtype of sums, made of nothing if there are none yet."""
        wide = accumulation_dtype(self._q.dtype)
        if self._totals is not None:
            out_BSHD, lse_BHS = self._totals
            self._totals = out_BSHD.to(wide), lse_BHS.to(wide)
        else:
            batch, tokens, heads, _ = self._shape
            lse_BHS = self._q.new_full((batch, heads, tokens), float("-inf"), dtype=wide)
            self._totals = self._q.new_zeros(self._shape, dtype=wide), lse_BHS
        return self._totals
