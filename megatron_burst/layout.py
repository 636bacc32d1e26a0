"""Which tokens each context-parallel rank holds: intervals of positions, and back again.

Four ranks under zigzag; a digit is the rank that holds that eighth of the sequence:

    0 1 2 3 3 2 1 0

Under a causal mask every rank then has the same number of (query, key) pairs to compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Interval(NamedTuple):
    """Positions, or rows of a tensor, from `start` up to but without `stop`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of positions."""
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """The slice that selects these rows."""
        return slice(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Layout:
    """The intervals of positions that every rank holds, in the order of its local rows."""

    shards: tuple[tuple[Interval, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.shards)

    @property
    def local_tokens(self) -> int:
        """The number of tokens a rank holds, the same on every rank."""
        return sum(interval.length for interval in self.shards[0])

    def local_rows(self, rank: int) -> tuple[Interval, ...]:
        """Return, for each interval of `rank`, the local rows that hold it."""
        rows, start = [], 0
        for interval in self.shards[rank]:
            rows.append(Interval(start, start + interval.length))
            start += interval.length
        return tuple(rows)

    def positions(self, rank: int) -> Tensor:
        """Return the position in the sequence of each local row: int64 [local tokens]."""
        return torch.cat([torch.arange(i.start, i.stop) for i in self.shards[rank]])

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return `x.index_select(dim, positions(rank))`: the rows of the whole that `rank` holds.

        Raises:
            ValueError: `x` does not have this layout's number of tokens along `dim`.
        """
        tokens = self.ranks * self.local_tokens
        if x.shape[dim] != tokens:
            raise ValueError(f"expected {tokens} tokens along dim {dim}, got {tuple(x.shape)}")
        return torch.cat([x.narrow(dim, i.start, i.length) for i in self.shards[rank]], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Put the shards of all ranks back into one tensor in the order of the sequence."""
        pieces = {
            interval: shards[rank].narrow(dim, rows.start, rows.length)
            for rank in range(self.ranks)
            for interval, rows in zip(self.shards[rank], self.local_rows(rank), strict=True)
        }
        return torch.cat([pieces[interval] for interval in sorted(pieces)], dim)


def zigzag(tokens: int, ranks: int) -> Layout:
    """Cut the sequence into 2P equal chunks; rank r holds chunks r and 2P-1-r.

    This is Megatron's own split, so its data loader and rotary positions fit unchanged.

    Raises:
        ValueError: the sequence does not divide into 2P chunks.
    """
    chunks = 2 * ranks
    if tokens <= 0 or tokens % chunks:
        raise ValueError(
            f"zigzag needs a sequence divisible by 2 x {ranks} ranks = {chunks}, got {tokens} "
            f"tokens; change --seq-length or --context-parallel-size"
        )
    size = tokens // chunks

    def chunk(index: int) -> Interval:
        return Interval(index * size, (index + 1) * size)

    if ranks == 1:
        return Layout(((Interval(0, tokens),),))
    return Layout(tuple((chunk(r), chunk(chunks - 1 - r)) for r in range(ranks)))


def contiguous(tokens: int, ranks: int) -> Layout:
    """Cut the sequence into P equal pieces, one a rank; unbalanced under a causal mask.

    Raises:
        ValueError: the sequence does not divide into P pieces.
    """
    if tokens <= 0 or tokens % ranks:
        raise ValueError(f"contiguous needs {tokens} tokens divisible by {ranks} ranks")
    size = tokens // ranks
    return Layout(tuple((Interval(r * size, (r + 1) * size),) for r in range(ranks)))
