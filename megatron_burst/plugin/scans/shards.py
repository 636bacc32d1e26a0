"""Where the documents of a packed sequence lie on the contiguous shard of one rank."""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """A rank's rows, `tokens` of them, cut where documents begin."""

    bounds: tuple[int, ...]
    """Rows at which one begins, between 0 first and `tokens` last."""

    before: int
    """How many tokens of the first row's document lie on ranks before."""

    @property
    def tokens(self) -> int:
        """The number of rows."""
        return self.bounds[-1]

    @property
    def is_crossed(self) -> bool:
        """Whether one document covers the shard and begins before it."""
        return self.before > 0 and len(self.bounds) == 2

    def numbers(self) -> Tensor:
        """Return which document each row belongs to, counted here: int32 [tokens]."""
        lengths = torch.tensor(self.bounds).diff()
        return torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)

    def near_starts(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the tokens whose window of the last `width` reaches over a document's start.

        int64 [tokens], and which tokens of their windows are of their own: bool [tokens, width].
        """
        starts = torch.tensor((-self.before, *self.bounds[1:-1]))
        ages = torch.arange(width - 1)
        tokens = starts.unsqueeze(1) + ages
        fits = (tokens >= 0) & (tokens < torch.tensor(self.bounds[1:]).unsqueeze(1))
        own = torch.arange(width) >= width - 1 - ages.unsqueeze(1)
        return tokens[fits], own.expand(len(starts), -1, -1)[fits]


@functools.lru_cache(256)
def shard_of(bounds: Sequence[int] | None, tokens: int, rank: int) -> Shard:
    """Return the shard of a rank with `tokens` of the sequence.

    `bounds`, hashable, are those of all documents: 0 first, the sequence's end last; None: it is
    one document.
    """
    start, stop = rank * tokens, (rank + 1) * tokens
    if bounds is None:
        return Shard((0, tokens), start)
    first, last = bisect_right(bounds, start), bisect_left(bounds, stop)
    inside = (bound - start for bound in bounds[first:last])
    return Shard((0, *inside, tokens), start - bounds[first - 1])
