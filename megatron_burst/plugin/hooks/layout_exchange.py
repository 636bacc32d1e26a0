"""Moves what a batch has per token from the data loader's zigzag to our layout, and losses back.

By an all-gather: token numbers and losses are a few bytes a token, attention sends thousands.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.attention.context import BurstContext
from megatron_burst.plans.layout import Layout, zigzag


def rows_elsewhere(held: Layout, wanted: Layout, rank: int) -> Tensor:
    """Return where `rank` finds its rows of layout `wanted` in the shards of layout `held`.

    The shards of all ranks stand one behind the other: int64 [local tokens].
    """
    where = torch.cat([held.positions(r) for r in range(held.ranks)]).argsort()
    return where[wanted.positions(rank)]


class LayoutExchange:
    """The ways of the rows of one context-parallel group; collective calls of its ranks."""

    def __init__(self, context: BurstContext) -> None:
        self._context = context
        self._rows: dict[tuple[int, bool, torch.device], Tensor] = {}

    def to_ours(self, x: Tensor) -> Tensor:
        """Return this rank's rows in our layout of [batch, local tokens] in Megatron's zigzag.

        Differentiable, like its inverse.
        """
        return _Exchange.apply(x, self, True)

    def to_megatrons(self, x: Tensor) -> Tensor:
        """Undo `to_ours`."""
        return _Exchange.apply(x, self, False)

    def move(self, x: Tensor, to_ours: bool) -> Tensor:
        """Carry out one exchange."""
        group = self._context.group
        if group is None:
            return x
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        rows = self._find(x.shape[1] * group.size(), to_ours, x.device)
        return torch.cat(shards, dim=1).index_select(1, rows)

    def _find(self, tokens: int, to_ours: bool, device: torch.device) -> Tensor:
        key = tokens, to_ours, device
        if key not in self._rows:
            megatrons = zigzag(tokens, self._context.ranks)
            ways = (megatrons, self._context.layout(tokens))
            held, wanted = ways if to_ours else ways[::-1]
            self._rows[key] = rows_elsewhere(held, wanted, self._context.rank).to(device)
        return self._rows[key]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: LayoutExchange, to_ours: bool) -> Tensor:
        ctx.arguments = exchange, to_ours
        return exchange.move(x, to_ours)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, to_ours = ctx.arguments
        return exchange.move(grad, not to_ours), None, None
