"""What a rank adds up of what kernel calls return, of its own tokens and of those that visit it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_burst.attention.launches import (
    Launch,
    Parts,
    Rows,
    rows_of,
    views_of,
    write_rows,
)
from megatron_burst.attention.sink import add_sink
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.in_triton import triton_kernels
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.transport.lowered import Block, Form, forms_of
from megatron_burst.transport.memory import write


class WireDtypes(NamedTuple):
    """The dtypes in which gradients travel; None is that of sums, as which nothing is rounded."""

    partials: torch.dtype | None = None  # of what one kernel call returned
    sums: torch.dtype | None = None


class Sums:
    """Sums of gradients by item, in float32 (float64 for float64 inputs)."""

    nothing = 0.0, 0.0  # what is in either tensor where nothing was added

    def __init__(
        self,
        rank: int,  # what belongs to another rank is a visitor's
        shaped: Mapping[Kind, Block],  # tensors of the shapes of one rank's sums
        wire: WireDtypes,
    ) -> None:
        self._rank, self._shaped, self._wire = rank, shaped, wire
        self._wide = accumulation_dtype(next(iter(shaped.values()))[0].dtype)
        # What a single call returned stays as it came.
        self._sums: dict[Item, tuple[Rows, Block]] = {}

    def forms(self, item: Item) -> list[Form]:
        """Return the shapes and dtypes in which an item travels."""
        dtype = self._wire.sums if item == item.sum else self._wire.partials
        return [Form(t.shape, dtype or self._wide) for t in self._shape(item)]

    def make_room(self, launch: Launch) -> None:
        """Widen first results before a second launch is made, not while it waits to be added."""
        for item in self.added_by(launch):
            if item in self._sums:
                self._whole(item)

    def added_by(self, launch: Launch) -> tuple[Item, ...]:
        """Return what a kernel launch adds to."""
        return launch.tile.gradients

    def collect(self, launch: Launch, results: Block) -> None:
        """Add what a kernel launch has returned; the tensors become ours."""
        (dq, *d_kv), (query, key) = results, launch.tile.gradients
        self.add(query, launch.queries, (dq,))
        self.add(key, launch.keys, tuple(d_kv))

    def end_step(self) -> None:
        """The tiles of a step, or of a block, have added all that they had."""

    def add(self, item: Item, rows: Rows, parts: Block) -> None:
        """Add results to these rows of the item; the tensors become ours."""
        if item in self._sums:
            self.accumulate(self._whole(item), rows, parts)
        else:
            self._sums[item] = rows, parts

    def take(self, item: Item, block: Block, parts: Parts) -> None:
        """Add what has arrived; it is not looked at again."""
        rows: Rows = self._all_rows(item)
        if item.owner == self._rank and item.part:
            rows, item = parts[item.part], item._replace(part=())
        self.accumulate(self._whole(item.sum), rows, block)

    def accumulate(self, total: Block, rows: Rows, parts: Block) -> None:
        """Add parts, which stay as they are, to these rows of a total."""
        if (fused := triton_kernels(parts[0])) is not None:
            views, index = views_of(total, rows)
            for view, part in zip(views, parts, strict=True):
                fused.add(view, part, index)
            return
        sums = rows_of(total, rows)
        for target, part in zip(sums, parts, strict=True):
            target += part
        write_rows(total, rows, sums)

    def pop(self, item: Item) -> tuple[Rows, Block]:
        """Return what was added up of an item, and to which rows; it starts anew."""
        return self._sums.pop(item)

    def hand_on(self, item: Item, into: Block) -> None:
        """Write the item's sum to where it is sent from; it starts anew."""
        rows, block = self._sums.pop(item.sum, (None, ()))
        if rows == self._all_rows(item):
            write(into, block)
            return
        for t, value in zip(into, self.nothing, strict=False):
            t.fill_(value)
        if rows is not None:
            self.accumulate(into, rows, block)

    def total(self, item: Item) -> Block:
        """Return the item's sum, or what a single call returned where that covers all rows."""
        rows, block = self._sums.get(item, (None, ()))
        return block if rows == self._all_rows(item) else self._whole(item)

    def release(self, item: Item, dtype: torch.dtype) -> list[Tensor]:
        """Return the item's sum in this dtype; each tensor of it is freed before the next one."""
        total = [*self.total(item)]
        self._sums.pop(item, None)
        return _to(dtype, total)

    def _whole(self, item: Item) -> Block:
        """Return the sum of all rows in the dtype of sums."""
        rows, block = self._sums.get(item, (None, ()))
        every = self._all_rows(item)
        if rows == every and block[0].dtype is self._wide is block[-1].dtype:
            return block
        if rows == every:
            narrow = [*self._sums.pop(item)[1]]
            del block  # each tensor is freed before the next one is made wide
            total = tuple(_to(self._wide, narrow))
        else:
            total = tuple(
                torch.full(t.shape, x, dtype=self._wide, device=t.device)
                for t, x in zip(self._shape(item), self.nothing, strict=False)
            )
            if rows is not None:
                self.accumulate(total, rows, block)
        self._sums[item] = every, total
        return total

    def _all_rows(self, item: Item) -> Interval:
        return Interval(0, self._shape(item)[0].shape[1])

    def _shape(self, item: Item) -> Block:
        return rows_of(self._shaped[item.kind.sum], item.packed)


def _to(dtype: torch.dtype, tensors: list[Tensor]) -> list[Tensor]:
    """Convert tensors, of which none is left in the list."""
    return [tensors.pop(0).to(dtype) for _ in range(len(tensors))]


class PartialOutputs(Sums):
    """Sums of (out, lse) of queries against some of the keys.

    Equal softmax over all keys seen so far: with m = logaddexp of the lse's,
    out = Σ exp(lse_i - m) out_i. A row without a tile has out = 0 and lse = -inf. An output is
    rounded to the queries' dtype when it is sent, once; the log-sum-exp stays wide.
    """

    nothing = 0.0, float("-inf")

    def __init__(self, rank: int, q: Tensor, value_head_dim: int) -> None:
        batch, tokens, heads, _ = q.shape
        out = q.new_empty((1,)).expand(batch, tokens, heads, value_head_dim)
        lse = q.new_empty((1,), dtype=accumulation_dtype(q.dtype)).expand(batch, heads, tokens)
        super().__init__(rank, {Kind.OUTPUT: (out, lse)}, WireDtypes())
        self._own = Item(Kind.OUTPUT, rank)

    def forms(self, item: Item) -> list[Form]:
        """Return the shapes and dtypes in which an output travels."""
        return forms_of(self._shape(item))

    def added_by(self, launch: Launch) -> tuple[Item, ...]:
        """Return the output that a kernel launch adds to."""
        return (launch.tile.output,)

    def collect(self, launch: Launch, results: Block) -> None:
        """Add (out, lse) of a kernel call; the tensors become ours."""
        self.add(launch.tile.output, launch.queries, results)

    def accumulate(self, total: Block, rows: Rows, parts: Block) -> None:
        """Merge results in which rows may have seen nothing; they stay as they are."""
        out_BSHD, lse_BHS = parts
        if (fused := triton_kernels(out_BSHD)) is not None:
            views, index = views_of(total, rows)
            fused.merge(*views, out_BSHD, lse_BHS, index)
            return
        total_out, total_lse = sums = rows_of(total, rows)
        merged = torch.logaddexp(total_lse, lse_BHS)
        finite = merged.clamp_min(torch.finfo(merged.dtype).min)  # -inf - -inf would be NaN
        total_out.mul_((total_lse - finite).exp().mT[..., None])  # [B, S, H, 1]
        total_out.addcmul_((lse_BHS - finite).exp().mT[..., None], out_BSHD)
        total_lse.copy_(merged)
        write_rows(total, rows, sums)

    def finish(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (out, lse) of the rank's own queries, each head's sink among the scores."""
        out_BSHD, lse_BHS = self.total(self._own)
        if sink is not None:
            out_BSHD, lse_BHS = add_sink(out_BSHD, lse_BHS, sink)
        return out_BSHD.to(self._shape(self._own)[0].dtype), lse_BHS
