"""Ulysses: an all-to-all that trades a rank's share of the tokens for a share of the heads.

Each rank then has whole sequences for its heads, and attention needs no further messages.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.comm import Communicator
from megatron_burst.layout import Interval, Layout
from megatron_burst.plan import Channel, Hop, Item, Kind, Plan, assemble


def exchange_plan(rank: int, ranks: int) -> Plan:
    """Plan one all-to-all: part t of what rank s has goes to rank t."""
    pairs = [(s, t) for s in range(ranks) for t in range(ranks) if s != t]
    hops = [Hop(_share(s, t), s, t, Channel.READ_WITHIN, 0, 0) for s, t in pairs]
    return assemble(rank, hops, {})


def _share(source: int, target: int) -> Item:
    """The item that `source` has for `target`."""
    return Item(Kind.HEADS, source, Interval(target, target + 1))


class HeadExchange:
    """The all-to-all of one context-parallel group."""

    def __init__(self, rank: int, ranks: int, communicator: Communicator) -> None:
        self.rank, self.ranks = rank, ranks
        self._plan, self._communicator = exchange_plan(rank, ranks), communicator

    def to_heads(self, x: Tensor, layout: Layout) -> Tensor:
        """[batch, local tokens, heads, d] of this rank's tokens -> [batch, tokens, heads / P, d].

        Equals `context.unshard(x, dim=1)` cut along the heads. Differentiable.

        Raises:
            ValueError: the heads do not divide by the number of ranks.
        """
        if x.shape[2] % self.ranks:
            raise ValueError(
                f"ulysses spreads heads over the ranks: {x.shape[2]} query or kv heads of a rank "
                f"do not divide by {self.ranks}; change --num-attention-heads, --num-query-groups "
                "or --context-parallel-size, or take --context-parallel-algo burst"
            )
        return _Exchange.apply(x, self, layout, True)

    def to_tokens(self, x: Tensor, layout: Layout) -> Tensor:
        """Undo `to_heads`."""
        return _Exchange.apply(x, self, layout, False)

    def exchange(self, x: Tensor, layout: Layout, to_heads: bool) -> Tensor:
        """Carry out one all-to-all."""
        if to_heads:
            parts = [part.contiguous() for part in x.chunk(self.ranks, dim=2)]
        else:
            parts = [layout.shard(x, rank, dim=1).contiguous() for rank in range(self.ranks)]
        outgoing = {_share(self.rank, t): (part,) for t, part in enumerate(parts)}
        flight = self._communicator.begin("head exchange", lambda _: (parts[0],))
        for number, step in enumerate(self._plan.steps):
            flight.post(number, step, outgoing)
            for item, (part,) in flight.land(number):
                parts[item.owner] = part
        return layout.unshard(parts, dim=1) if to_heads else torch.cat(parts, dim=2)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: HeadExchange, layout: Layout, to_heads: bool
    ) -> Tensor:
        ctx.arguments = exchange, layout, to_heads
        return exchange.exchange(x, layout, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, layout, to_heads = ctx.arguments
        return exchange.exchange(grad, layout, not to_heads), None, None, None
