"""What the ranks need of each other's rows, found for all pairs of ranks at once.

A plan of one rank asks who else needs a block, and the choice of a schedule what every rank would
send. Both look at all pairs of ranks, so they are made of arrays here, and not of tiles.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.plan import Kind, Part
from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.cells import Cells
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.kinds import Visible
from megatron_burst.plans.visibility.mask import Mask


@dataclass(frozen=True, slots=True)
class Needs:
    """How much the queries of a rank see of the keys of another, for all pairs of ranks."""

    pairs: Ints
    """[query owner, key owner]: how many pairs of tokens the mask lets through."""
    is_banded: bool
    """Whether any rank has tiles that are neither full nor causal squares."""
    once: Mapping[Kind, NDArray[np.bool]]
    """[owner, user]: whether no row of a KV or QUERY block is in two tiles of a user, so that what
    kernels return of its gradient is no sum."""
    rows: Mapping[Kind, Ints]
    """[owner, user]: how many rows of a KV or QUERY block a rank needs."""
    parts: Mapping[Kind, Ints]
    """[owner, 2]: from the first to the last row that any other rank needs; see `part_of`."""
    ends: Mapping[Kind, Ints]
    """[2, owner, user]: the first row that another rank needs, and what follows the last; none
    under a mask that needs all rows of a block or none."""
    local: int
    """The rows of a rank."""

    @classmethod
    def of(cls, seen: Visible, mask: Mask, local: int) -> "Needs":
        """Return them, given what the ranks of `local` rows see of each other.

        Without a mask beside causality a rank needs all rows of a block or none.
        """
        pairs = seen.sums(attrgetter("pairs"))
        away = ~np.eye(len(pairs), dtype=bool)
        rows, once, parts, ends = {}, {}, {}, {}
        for kind in (Kind.KV, Kind.QUERY):
            of_cells = attrgetter("keys" if kind is Kind.KV else "queries")
            union, in_tiles, low, high = (
                x.T if kind is Kind.KV else x for x in _needed(seen, of_cells, local)
            )
            once[kind] = (union == in_tiles) | ~away
            rows[kind] = union if mask.is_sparse else local * (union > 0)
            parts[kind] = np.zeros((len(pairs), 2), np.int64)
            if mask.is_sparse:
                low, high = np.where(away, low, local), np.where(away, high, 0)
                ends[kind] = np.stack([low, high])
                parts[kind] = _inside(low.min(axis=1), high.max(axis=1), local)
        is_banded = any(part.cells.is_banded for part in seen.parts)
        return cls(pairs, is_banded, once, rows, parts, ends, local)

    def parts_of(self, kind: Kind, groups: Ints) -> Ints:
        """Return the `parts` that users need together, [group, owner, 2], of [group, user]."""
        low, high = self.ends[kind][:, :, groups]  # [owner, group, user]
        return _inside(low.min(axis=2).T, high.max(axis=2).T, self.local)

    def users(self, kind: Kind) -> NDArray[np.bool]:
        """Return which ranks have a use for the KV or QUERY block of another: [owner, user]."""
        seen = self.pairs.T if kind is Kind.KV else self.pairs
        return (seen > 0) & ~np.eye(len(seen), dtype=bool)


def _needed(
    seen: Visible, of_cells: Callable[[Cells], Ints], local: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return how many rows are needed, how many where each tile counts, and the ends of them.

    All [query owner, key owner]; several parts have no row in common.
    """
    shape = seen.parts[0].of_pairs.shape
    union, in_tiles, high = np.zeros((3, *shape), np.int64)
    low = np.full(shape, local)
    for part in seen.parts:
        count, of_pairs = len(part.counts), part.of_pairs
        of, (first, stop) = np.repeat(np.arange(count), part.counts), of_cells(part.cells).T
        least, most = np.full(count, local), np.zeros(count, np.int64)
        np.minimum.at(least, of, first)
        np.maximum.at(most, of, stop)
        union += _union(of, first, stop, count, local)[of_pairs]
        in_tiles += part.sums(stop - first)[of_pairs]
        low, high = np.minimum(low, least[of_pairs]), np.maximum(high, most[of_pairs])
    return union, in_tiles, low, high


def _union(pair: Ints, first: Ints, stop: Ints, count: int, local: int) -> Ints:
    """How many rows each of `count` pairs of ranks needs: the union of the given ones."""
    order = np.lexsort((first, pair))
    pair = pair[order]
    begins, ends = first[order] + pair * local, stop[order] + pair * local
    reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    new = np.maximum(0, ends - np.maximum(begins, reached))
    return np.bincount(pair, new, count).astype(np.int64)


def _inside(low: Ints, high: Ints, local: int) -> Ints:
    """Return the ends of parts, [..., 2]: 0 and 0 for all rows, and for none."""
    ends, size = np.stack([low, high], axis=-1), high - low
    return np.where(((size > 0) & (size < local))[..., None], ends, 0)


def part_of(ends: Ints) -> Part:
    """Return the rows between two ends; () for all of them."""
    start, stop = ends.tolist()
    return (Interval(start, stop),) if stop else ()
