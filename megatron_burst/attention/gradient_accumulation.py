"""The gradients that a rank sums, of its own tokens and of those that visit it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_burst.attention.rows import Parts, Rows, rows_of, views_of, write_rows
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.in_triton import triton_kernels
from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Item, Kind, Send
from megatron_burst.transport.comm import Block


class WireDtypes(NamedTuple):
    """The dtypes in which gradients travel; None is that of sums, as which nothing is rounded."""

    partials: torch.dtype | None = None  # of what one kernel call returned
    sums: torch.dtype | None = None


@dataclass(slots=True)
class _Sum:
    """What has been added up of an item; a single partial stays as it came."""

    rows: Rows
    block: Block


class GradientAccumulator:
    """Sums of gradients by item, in float32 (float64 for float64 inputs)."""

    def __init__(
        self,
        rank: int,  # what belongs to another rank is a visitor's
        shaped: Mapping[Kind, Block],  # tensors of the shapes of one rank's sums
        wire: WireDtypes,
    ) -> None:
        self._rank, self._shaped, self._wire = rank, shaped, wire
        self._sums: dict[Item, _Sum] = {}

    def template(self, item: Item) -> Block:
        """Return tensors without storage of the shapes and dtypes in which an item arrives."""
        dtype = self._wire.sums if item == item.sum else self._wire.partials
        return tuple(
            t.new_empty((1,), dtype=dtype or accumulation_dtype(t.dtype)).expand(t.shape)
            for t in self._shape(item)
        )

    def add(self, item: Item, rows: Rows, parts: Block) -> None:
        """Add a kernel call's gradients to these rows of the item; the tensors become ours."""
        if item in self._sums:
            _accumulate(self._whole(item), rows, parts)
        else:
            self._sums[item] = _Sum(rows, parts)

    def take(self, item: Item, block: Block, parts: Parts) -> None:
        """Add what has arrived; it is not looked at again."""
        rows: Rows = self._all_rows(item)
        if item.owner == self._rank and item.part:
            rows, item = parts[item.part], item._replace(part=())
        _accumulate(self._whole(item.sum), rows, block)

    def end_step(self) -> None:
        """The tiles of a step, or of a block, have added all that they had."""

    def pop(self, item: Item) -> tuple[Rows, Block]:
        """Return what was added up of an item, and to which rows; it starts anew."""
        found = self._sums.pop(item)
        return found.rows, found.block

    def hand_on(self, sends: Iterable[Send]) -> dict[Item, Block]:
        """Return what is sent of every gradient among `sends`; their sums start anew."""
        return {s.item: self._pop_to_send(s.item) for s in sends if s.item.kind.is_result}

    def total(self, item: Item) -> Block:
        """Return the item's sum, or its single partial where that covers all rows."""
        found = self._sums.get(item)
        if found is not None and found.rows == self._all_rows(item):
            return found.block
        return self._whole(item)

    def _pop_to_send(self, item: Item) -> Block:
        """Return all rows of a sum, zeros where it has none; what is narrow is never made wide."""
        found, shaped = self._sums.pop(item.sum, None), self.template(item)
        if found is not None and found.rows == self._all_rows(item):
            pairs = zip(found.block, shaped, strict=True)
            return tuple(t.to(like.dtype).contiguous() for t, like in pairs)
        total = tuple(t.new_zeros(t.shape) for t in shaped)
        if found is not None:
            _accumulate(total, found.rows, found.block)
        return total

    def _whole(self, item: Item) -> Block:
        """Return the sum of all rows in the dtype of sums, zeros if there is none yet."""
        found, every = self._sums.get(item), self._all_rows(item)
        if found is not None and found.rows == every:
            wide = (t.to(accumulation_dtype(t.dtype)) for t in found.block)
            found.block = tuple(t.contiguous() for t in wide)  # messages are
            return found.block
        total = tuple(
            t.new_zeros(t.shape, dtype=accumulation_dtype(t.dtype)) for t in self._shape(item)
        )
        self._sums[item] = _Sum(every, total)
        if found is not None:
            _accumulate(total, found.rows, found.block)
        return total

    def _all_rows(self, item: Item) -> Interval:
        return Interval(0, self._shape(item)[0].shape[1])

    def _shape(self, item: Item) -> Block:
        return rows_of(self._shaped[item.kind.sum], item.packed)


def _accumulate(total: Block, rows: Rows, parts: Block) -> None:
    if (fused := triton_kernels(parts[0])) is not None:
        views, index = views_of(total, rows)
        for view, part in zip(views, parts, strict=True):
            fused.add(view, part, index)
        return
    sums = rows_of(total, rows)
    for some, part in zip(sums, parts, strict=True):
        some += part
    write_rows(total, rows, sums)
