"""Which tokens each context-parallel rank holds: ranges of positions, and back again.

Four ranks; a digit is the rank that holds that eighth of the sequence (sixteenth where segmented):

    zigzag            0 1 2 3 3 2 1 0
    segmented zigzag  0 1 2 3 3 2 1 0 0 1 2 3 3 2 1 0
    contiguous        0 0 1 1 2 2 3 3
    striped           every fourth token, from token r on

Under a causal mask zigzag and striped give every rank the same number of (query, key) pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_burst.plans.visibility.interval import Interval


@dataclass(frozen=True)
class Layout:
    """The ranges of positions that every rank holds, in the order of its local rows."""

    shards: Sequence[tuple[range, ...]]

    @cached_property
    def _hash(self) -> int:  # of thousands of ranges, and whenever a plan is looked up
        return hash(self.shards)

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.shards)

    @property
    def local_tokens(self) -> int:
        """The number of tokens a rank holds, the same on every rank."""
        return sum(map(len, self.shards[0]))

    @property
    def tokens(self) -> int:
        """The number of tokens of the sequence."""
        return self.ranks * self.local_tokens

    @property
    def documents(self) -> tuple[int, ...] | None:
        """The lengths of documents that are each in zigzag, where it is made of them."""
        return self.shards.lengths if isinstance(self.shards, _ZigzagOfEach) else None

    def check(self) -> None:
        """Raise a ValueError unless each token is on one rank, and ranges have one step.

        Between ranges of several steps what is seen is no band.
        """
        if self.documents is not None:  # which are right as they are made
            return
        ranges = [r for shard in self.shards for r in shard if r]
        start, stop, steps = np.array([(r.start, r[-1] + r.step, r.step) for r in ranges]).T
        step, sizes = steps[0], {sum(map(len, shard)) for shard in self.shards}
        order = np.lexsort((start, start % step))
        start, stop = start[order], stop[order]
        fits = len(sizes) == 1 and step > 0 and (steps == step).all() and start.min() >= 0
        fits &= stop.max() - step < self.tokens
        if not fits or ((start[1:] < stop[:-1]) & (np.diff(start % step) == 0)).any():
            raise ValueError(
                "a layout gives each token to one rank, as many to each, in ranges of one step; "
                f"got ranges that begin with {ranges[:4]}"
            )

    def local_rows(self, rank: int) -> tuple[Interval, ...]:
        """Return, for each range of `rank`, the local rows that hold it."""
        rows, start = [], 0
        for positions in self.shards[rank]:
            rows.append(Interval(start, start + len(positions)))
            start += len(positions)
        return tuple(rows)

    def positions(self, rank: int) -> Tensor:
        """Return the position in the sequence of each local row: int64 [local tokens]."""
        return torch.cat([torch.arange(r.start, r.stop, r.step) for r in self.shards[rank]])

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return the rows that `rank` holds: `x.index_select(dim, positions(rank))`."""
        if x.shape[dim] != self.tokens:
            raise ValueError(f"expected {self.tokens} tokens along dim {dim}, got {tuple(x.shape)}")
        return torch.cat([_at(x, positions, dim) for positions in self.shards[rank]], dim)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Put the shards of all ranks back into one tensor in the order of the sequence."""
        shape = list(shards[0].shape)
        shape[dim] = self.tokens
        whole = shards[0].new_empty(shape)
        for rank, shard in enumerate(shards):
            for positions, rows in zip(self.shards[rank], self.local_rows(rank), strict=True):
                _at(whole, positions, dim).copy_(shard.narrow(dim, rows.start, rows.length))
        return whole


def zigzag(tokens: int, ranks: int) -> Layout:
    """Cut the sequence into 2P equal chunks; rank r holds chunks r and 2P-1-r.

    This is Megatron's own split, so its data loader and rotary positions fit unchanged.
    """
    return segmented_zigzag((tokens,), ranks)


def segmented_zigzag(segments: Sequence[int], ranks: int) -> Layout:
    """Cut the sequence into segments of these lengths, each of them in zigzag by itself.

    Every rank has an equal share of each segment, and under a causal mask of its work; ValueError
    for a segment that does not divide into 2P chunks, but for one rank.
    """
    _check_chunks(segments, ranks)
    return Layout(tuple(zigzag_of_each(segments, ranks).shards))


@dataclass(frozen=True, slots=True)
class _ZigzagOfEach(Sequence[tuple[range, ...]]):
    """The shards of documents that are each in zigzag, made when asked for: they may be many."""

    lengths: tuple[int, ...]
    ranks: int
    _known: dict[int, tuple[range, ...]] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        """Return the ranges of a rank, or of several."""
        if isinstance(rank, slice):
            return tuple(self[each] for each in range(self.ranks)[rank])
        rank = range(self.ranks)[rank]
        if rank not in self._known:
            self._known[rank] = tuple(self._ranges(rank))
        return self._known[rank]

    def _ranges(self, rank: int) -> Iterator[range]:
        chunks, end = 2 * self.ranks, 0
        for length in self.lengths:
            size, start, end = length // chunks, end, end + length
            yield range(start + rank * size, start + (rank + 1) * size)
            yield range(end - (rank + 1) * size, end - rank * size)


def zigzag_of_each(lengths: Sequence[int], ranks: int) -> Layout:
    """Cut documents of these lengths as `segmented_zigzag` cuts segments, any number at once."""
    if ranks == 1:  # of any lengths
        return Layout(((range(sum(lengths)),),))
    _check_chunks(lengths, ranks)
    shards = _ZigzagOfEach(tuple(lengths), ranks)
    return Layout(shards if len(lengths) > 1 else tuple(shards))


def _check_chunks(segments: Sequence[int], ranks: int) -> None:
    chunks = 2 * ranks
    for length in segments:
        if length <= 0 or (ranks > 1 and length % chunks):
            what = "a sequence" if len(segments) == 1 else f"{len(segments)} segments, each"
            raise ValueError(
                f"zigzag needs {what} divisible by 2 x {ranks} ranks = {chunks}, got {length} "
                f"tokens; change --seq-length or --context-parallel-size"
            )


def contiguous(tokens: int, ranks: int) -> Layout:
    """Cut the sequence into P equal pieces, one a rank; unbalanced under a causal mask."""
    size = _share("contiguous", tokens, ranks)
    return Layout(tuple((range(r * size, (r + 1) * size),) for r in range(ranks)))


def striped(tokens: int, ranks: int) -> Layout:
    """Give rank r every P-th token from token r on (striped attention, arXiv 2311.09431)."""
    _share("striped", tokens, ranks)
    return Layout(tuple((range(r, tokens, ranks),) for r in range(ranks)))


def boundary(layout: Layout, fraction: float) -> int:
    """Return the position before which rows are recomputed: the border of chunks nearest to ρ·S.

    The later rows are saved in a checkpointed call's first pass. A rank alone, or one that holds
    every P-th token, has no chunks, and any position will do.
    """
    wanted = fraction * layout.tokens
    if layout.ranks == 1 or any(r.step > 1 for shard in layout.shards for r in shard):
        return round(wanted)
    borders = {layout.tokens, *(r.start for shard in layout.shards for r in shard)}
    return min(sorted(borders), key=lambda border: abs(border - wanted))


def in_order(layout: Layout) -> Layout:
    """Return the layout whose ranks hold the same, in the order of the sequence."""
    ranges = (sorted(shard, key=lambda positions: positions.start) for shard in layout.shards)
    return Layout(tuple(map(tuple, ranges)))


def first_saved_row(layout: Layout, rank: int, stop: int) -> int:
    """Return how many rows of a rank have positions before `stop`.

    Raises:
        ValueError: those of some rank are not its first; every rank refuses such a layout.
    """
    numbers = []
    for number, shard in enumerate(layout.shards):
        before = [len(range(r.start, min(r.stop, stop), r.step)) for r in shard]
        row = sum(before)
        for count, rows in zip(before, layout.local_rows(number), strict=True):
            if count != min(rows.length, max(0, row - rows.start)):
                if any(r.step > 1 for r in shard):
                    raise ValueError(
                        "stripes with a Ulysses degree above 1 have no late rows that could be "
                        "saved: take --burst-layout zigzag, or --burst-head-parallel-size 1"
                    )
                raise ValueError(
                    f"rank {number} holds its rows in another order than the sequence, so its late "
                    "ones cannot be saved: in_order(layout) holds the same in order"
                )
        numbers.append(row)
    return numbers[rank]


def _share(name: str, tokens: int, ranks: int) -> int:
    if tokens <= 0 or tokens % ranks:
        raise ValueError(f"{name} needs {tokens} tokens divisible by {ranks} ranks")
    return tokens // ranks


def _at(x: Tensor, positions: range, dim: int) -> Tensor:
    index = (slice(None),) * (dim % x.ndim) + (
        slice(positions.start, positions.stop, positions.step),
    )
    return x[index]
