"""The kernel calls of a plan as a device runs them: rows by slices or tables, made once a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_burst.kernels.protocol import Packing
from megatron_burst.plans.schedules.batches import Known, TileBatch, batches_of
from megatron_burst.plans.schedules.plan import Part, Plan, Tiles
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.transport.lowered import Block
from megatron_burst.transport.pinned import to_device


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows that are no slice, none of them twice, in the order in which a kernel has them."""

    index: Tensor  # int64, on the device of the blocks


type Rows = Interval | RowTable
type Parts = Mapping[Part, Rows]
"""Those of a rank's own tensors that leave, or whose results come home."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A `TileBatch`: which rows of which blocks it reads, and how they are packed."""

    tile: Tiles
    band: Band
    queries: Rows
    keys: Rows
    packing: Packing | None  # of several sequences


type Launches = Sequence[Sequence[Launch]]  # by step


def launches_of(plans: Sequence[Plan], batch: int, device: torch.device) -> list[Launches]:
    """Return the kernel calls of every step of plans, their tables on the device.

    Steps whose tiles have the same rows share them.
    """
    known: Known = {}
    made: dict[int, Launch] = {}

    def on_device(call: TileBatch) -> Launch:
        key = id(call.lengths)  # the object is the same where rows are
        if key not in made:
            made[key] = _on_device(call, batch, device)
        return replace(made[key], tile=call.tile)

    steps = [[batches_of(step.blocks, known) for step in plan.steps] for plan in plans]
    return [[[on_device(call) for call in calls] for calls in of_plan] for of_plan in steps]


def own_parts(plans: Sequence[Plan], device: torch.device) -> Parts:
    """Return the parts of a rank's own tensors in its plans, their tables on the device."""
    moved = ((plan.rank, transfer.item) for plan in plans for transfer in plan.transfers)
    parts = {item.part for rank, item in moved if item.owner == rank}
    return {part: _rows(part, device) for part in parts if part}


def _on_device(call: TileBatch, batch: int, device: torch.device) -> Launch:
    def begins(lengths: tuple[int, ...]) -> Tensor:
        return _table(np.array([*accumulate(lengths * batch, initial=0)], np.int32), device)

    packing = None
    if len(call.lengths) > 1:
        heights, widths = zip(*call.lengths, strict=True)
        packing = Packing(heights, widths, begins(heights), begins(widths))
    queries, keys = (_rows(runs, device) for runs in (call.queries, call.keys))
    return Launch(call.tile, call.band, queries, keys, packing)


def _rows(runs: Sequence[Interval], device: torch.device) -> Rows:
    if len(runs) == 1:
        return runs[0]
    return RowTable(_table(np.concatenate([np.arange(*run) for run in runs]), device))


def _table(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, device="cpu"), device)


def rows_of(block: Block, rows: Rows | None) -> Block:
    """Return these rows of every tensor, [B, S, H, D] or [B, H, S]; None is all.

    Views of a slice, copies of what a table says.
    """
    return block if rows is None else tuple(_of(t, rows) for t in block)


def views_of(block: Block, rows: Rows) -> tuple[Block, Tensor | None]:
    """Return views that have these rows and, of a table, which of their rows they are."""
    return (block, rows.index) if isinstance(rows, RowTable) else (rows_of(block, rows), None)


def write_rows(block: Block, rows: Rows, values: Block) -> None:
    """Write back what was made in place of `rows_of(block, rows)`; nothing to do for views."""
    if isinstance(rows, RowTable):
        for t, value in zip(block, values, strict=True):
            t.index_copy_(_tokens(t), rows.index, value)


def _of(t: Tensor, rows: Rows) -> Tensor:
    if isinstance(rows, RowTable):
        return t.index_select(_tokens(t), rows.index)
    return t.narrow(_tokens(t), rows.start, rows.length)


def _tokens(t: Tensor) -> int:
    return 1 if t.ndim == 4 else 2
