"""The rows of all ranks in pieces that see, or are seen, alike where documents and blocks end."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Bounds


@dataclass(frozen=True, slots=True)
class Pieces:
    """Rows of ranks, cut so that no piece crosses a border of a document or block: arrays."""

    owner: Ints
    first: Ints  # local rows
    stop: Ints
    starts: Ints  # the first and the last position
    lasts: Ints
    step: int  # from position to position

    def __getitem__(self, which: slice | NDArray[np.integer | np.bool]) -> "Pieces":
        ends = self.owner[which], self.first[which], self.stop[which]
        return Pieces(*ends, self.starts[which], self.lasts[which], self.step)

    @property
    def bounds(self) -> Bounds:
        """The first and the last position of each."""
        return self.starts, self.lasts


def _alike(shards: Sequence[Sequence[range]]) -> Sequence[Sequence[range]]:
    """Cut all ranks' ranges at the same rows, if some rank's are cut there already.

    The two chunks of the last rank of a zigzag are one range; uncut, it would not be like others.
    """
    borders = [{0, *accumulate(map(len, shard))} for shard in shards]
    every = sorted(set().union(*borders))
    lengths = {*map(len, borders)}
    if lengths == {len(every)} or len(every) != max(lengths):
        return shards
    return [list(_cut(shard, every)) for shard in shards]


def _cut(shard: Sequence[range], borders: Sequence[int]) -> Iterator[range]:
    ends = accumulate(map(len, shard))
    for positions, end in zip(shard, ends, strict=True):
        first = end - len(positions)
        inside = borders[bisect_left(borders, first) : bisect_right(borders, end)]
        yield from (positions[a - first : b - first] for a, b in pairwise(inside))


def cut_pieces(layout: Layout, cuts: Sequence[int]) -> Pieces:
    """Cut the ranges of positions of all ranks, in their order, at `cuts`, which grow."""
    shards = _alike(layout.shards)
    ranges = [positions for shard in shards for positions in shard]
    owner = np.repeat(np.arange(layout.ranks), [len(shard) for shard in shards])
    start, length = np.array([(r.start, len(r)) for r in ranges]).T
    step, borders = ranges[0].step, np.array([*cuts, layout.tokens])
    local = np.cumsum(length) - length - owner * layout.local_tokens  # the first row
    low, high = (np.searchsorted(borders, x, "right") for x in (start, start + step * (length - 1)))
    count = high - low + 1
    of = np.repeat(np.arange(len(ranges)), count)  # which range each piece is of
    number = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    before = borders[low[of] + number - 1]
    first = np.where(number > 0, -((start[of] - before) // step), 0)  # rows of the range
    stop = np.where(number < count[of] - 1, np.append(first[1:], 0), length[of])
    ends = start[of] + step * first, start[of] + step * (stop - 1)
    return Pieces(owner[of], local[of] + first, local[of] + stop, *ends, step)[stop > first]
