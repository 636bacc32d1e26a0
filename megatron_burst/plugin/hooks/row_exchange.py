"""Moves rows between layouts of ranks: each to the rank that holds it there, and gradients back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.transport.pinned import to_device


@dataclass(frozen=True, slots=True)
class Moves:
    """The rows of one rank that leave, in the order of who gets them, and those that arrive."""

    leave: Tensor  # int64: which rows of its shard
    sent: list[int]  # how many of them each rank gets
    arrive: Tensor  # int64: which rows of its result
    received: list[int]  # how many of them come from each rank

    @property
    def back(self) -> "Moves":
        """The same the other way round."""
        return Moves(self.arrive, self.received, self.leave, self.sent)

    def rows_sent(self, rank: int) -> int:
        """Return how many rows this rank sends to others."""
        return sum(self.sent) - self.sent[rank]

    def on(self, device: torch.device) -> "Moves":
        """Return them with the rows on a device."""
        leave, arrive = (to_device(rows, device) for rows in (self.leave, self.arrive))
        return Moves(leave, self.sent, arrive, self.received)


def find_moves(
    held: Layout, wanted: Layout, rank: int, bounds: Sequence[int] | None = None
) -> Moves:
    """Return how the rows of layout `wanted` get those of layout `held`.

    With the bounds of documents (0 first, the end of the sequence last) each row gets the one
    behind its own in the sequence, and the last of every document none.
    """
    step, borders = int(bounds is not None), torch.tensor(bounds or (), dtype=torch.int64)
    own, sought = held.positions(rank), wanted.positions(rank) + step
    leave, arrive = ((~torch.isin(x, borders)).nonzero()[:, 0] for x in (own, sought))
    targets, rows = _find(wanted, own[leave] - step)
    sources, _ = _find(held, sought[arrive])
    by_target = (targets * wanted.local_tokens + rows).argsort()
    return Moves(
        leave[by_target],
        targets.bincount(minlength=held.ranks).tolist(),
        arrive[sources.argsort(stable=True)],
        sources.bincount(minlength=held.ranks).tolist(),
    )


def _find(layout: Layout, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rank holds each position, and in which of its rows."""
    pieces = []
    for rank, shard in enumerate(layout.shards):
        for span, rows in zip(shard, layout.local_rows(rank), strict=True):
            one_by_one = enumerate(span) if span.step > 1 else [(0, span.start)]
            pieces += [(start, rank, rows.start + row) for row, start in one_by_one]
    starts, ranks, first_rows = torch.tensor(sorted(pieces)).T.contiguous()
    piece = torch.searchsorted(starts, positions, right=True) - 1
    return ranks[piece], first_rows[piece] + positions - starts[piece]


@dataclass(frozen=True)
class RowExchange:
    """The moves of a micro-batch between the caller's layout and ours; collective calls.

    An all-to-all: a rank sends its rows once, and takes for a moment three times their memory.
    """

    group: dist.ProcessGroup  # of the context-parallel ranks
    callers: Layout  # which tokens the ranks have before the model and behind it
    ours: Layout  # which they have inside it
    bounds: Sequence[int]  # of the documents, 0 first, the end of the sequence last
    device: torch.device  # of the tensors

    @cached_property
    def is_needed(self) -> bool:
        """Whether rows move at all."""
        return self.callers != self.ours

    @cached_property
    def _to_ours(self) -> Moves:
        return find_moves(self.callers, self.ours, self.group.rank()).on(self.device)

    @cached_property
    def _to_next(self) -> Moves:
        rank = self.group.rank()
        return find_moves(self.ours, self.ours, rank, self.bounds).on(self.device)

    def to_ours(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows in our layout of tensors [batch, rows], in one message."""
        if not self.is_needed:
            return dict(given)
        parts = {name: _bytes(x) for name, x in given.items()}
        carried = carry(torch.cat([*parts.values()], 1), self._to_ours, self.group)
        pieces = carried.split([part.shape[1] for part in parts.values()], 1)
        return {
            name: piece.contiguous().view(x.dtype).t().contiguous()
            for (name, x), piece in zip(given.items(), pieces, strict=True)
        }

    def to_callers(self, x: Tensor) -> Tensor:
        """Return this rank's rows in the caller's layout of [batch, rows, ...]; differentiable."""
        if not self.is_needed:
            return x
        return carry(x.transpose(0, 1), self._to_ours.back, self.group).transpose(0, 1)

    def next(self, x: Tensor) -> Tensor:
        """Return what comes next in its document for each row of [batch, rows] in our layout.

        Zero for the last row of a document.
        """
        if x.shape[1] != self.ours.local_tokens:
            raise ValueError(
                f"MTP moves tensors of {self.ours.local_tokens} tokens a rank, not "
                f"{tuple(x.shape)}: a padding mask under --sequence-parallel is cut up before it"
            )
        moved = carry(_bytes(x), self._to_next, self.group)
        return moved.view(x.dtype).t().contiguous()


def _bytes(x: Tensor) -> Tensor:
    """Return [batch, rows] as bytes [rows, bytes of the batch]."""
    return x.t().reshape(-1).view(torch.uint8).view(x.shape[1], -1)


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = moves, group
        leaving = x.index_select(0, moves.leave)
        arriving = x.new_empty(len(moves.arrive), *x.shape[1:])
        dist.all_to_all_single(arriving, leaving, moves.received, moves.sent, group)
        result = torch.empty_like if len(moves.arrive) == len(x) else torch.zeros_like
        return result(x).index_copy_(0, moves.arrive, arriving)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        moves, group = ctx.arguments
        return carry(gradient, moves.back, group), None, None


def carry(x: Tensor, moves: Moves, group: dist.ProcessGroup) -> Tensor:
    """Return the rows [rows, ...] that arrive, zero where none comes; collective, differentiable.

    One all-to-all: a message to each rank that gets rows. Backward it is that of `moves.back`.
    """
    carried: Tensor = _Carry.apply(x, moves, group)
    return carried
