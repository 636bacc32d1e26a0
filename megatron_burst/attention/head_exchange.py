"""An all-to-all that trades a rank's share of the tokens for a share of the heads.

Each rank of a group then has all tokens of the group for its heads: with all ranks in one group,
whole sequences, and attention needs no further messages (Ulysses).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.kernels.uncompiled import uncompiled
from megatron_burst.plans.schedules.plan import Channel, Hop, Item, Kind, Plan
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.lowered import Block, Form, Lowered
from megatron_burst.transport.memory import write
from megatron_burst.transport.nccl import MOST_PEERS
from megatron_burst.transport.profiling import span


@cache
def exchange_plan(rank: int, ranks: int) -> Plan:
    """Plan one all-to-all: part t of what rank s has goes to rank t.

    All is posted at the start, in groups of as many peers as NCCL bears. A group is that of all
    ranks at the same distances, so that both ends of a message have it in the same one.
    """
    hops = []
    for distance in range(1, ranks):
        group = (distance - 1) // MOST_PEERS
        for source in (rank, (rank - distance) % ranks):
            target = (source + distance) % ranks
            hops.append(Hop(_share(source, target), source, target, Channel.HEADS, 0, group))
    return Plan.of(rank, hops, {})


def _share(source: int, target: int) -> Item:
    return Item(Kind.HEADS, source, target=target)


class HeadExchange:
    """The all-to-all of one group, among whose tokens `layout` says which each rank holds."""

    def __init__(self, rank: int, layout: Layout, communicator: Communicator) -> None:
        self.rank, self.ranks = rank, layout.ranks
        self._layout, self._communicator = layout, communicator
        self.plan = exchange_plan(rank, layout.ranks)
        self._known: dict[tuple[Form, ...], Lowered] = {}

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """[batch, rank's tokens, heads, d] -> [batch, group's tokens, heads / ranks, d], each.

        Equals the tensors of all ranks put together by the layout and cut along the heads, which
        must divide by the ranks. Differentiable; gradients are sent in the tensors' dtype.
        """
        return _AllToAll.apply(self, True, *tensors)

    def to_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Undo `to_heads`."""
        return _AllToAll.apply(self, False, *tensors)

    def exchange(self, tensors: Sequence[Tensor], to_heads: bool) -> tuple[Tensor, ...]:
        """Carry out one all-to-all; what goes from rank to rank is one message."""
        with self._communicator.in_pass("head exchange"), span("head exchange"):
            return self._exchanged(tensors, to_heads)

    def _exchanged(self, tensors: Sequence[Tensor], to_heads: bool) -> tuple[Tensor, ...]:
        parts = {self.rank: self._cut(tensors, self.rank, to_heads)}
        forms = tuple(Form(t.shape, t.dtype) for t in parts[self.rank])
        if forms not in self._known:
            lower = self._communicator.lower
            self._known[forms] = lower("head exchange", self.plan, lambda _: forms)
        lowered, device = self._known[forms], tensors[0].device
        with self._communicator.transfers(lowered, {}, device) as transfers:
            for number in range(len(self.plan.steps)):
                for item, into in transfers.writes(number):
                    write(into, self._cut(tensors, item.target, to_heads))
                transfers.post(number)
                parts |= {item.owner: block for item, block in transfers.land(number)}
            of_each = zip(*(parts[rank] for rank in range(self.ranks)), strict=True)
            return tuple(self._join(of_one, to_heads) for of_one in of_each)

    def _cut(self, tensors: Sequence[Tensor], rank: int | None, to_heads: bool) -> Block:
        """Return what another rank, or this one, gets of tensors."""
        assert rank is not None
        if to_heads:
            return tuple(x.chunk(self.ranks, dim=2)[rank] for x in tensors)
        return tuple(self._layout.shard(x, rank, dim=1) for x in tensors)

    def _join(self, parts: tuple[Tensor, ...], to_heads: bool) -> Tensor:
        """Put the parts of all ranks together, in memory of their own."""
        return self._layout.unshard(parts, dim=1) if to_heads else torch.cat(parts, dim=2)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: HeadExchange, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = exchange, to_heads
        return exchange.exchange(tensors, to_heads)

    @staticmethod
    @uncompiled
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exchange, to_heads = ctx.arguments
        return None, None, *exchange.exchange(gradients, not to_heads)
