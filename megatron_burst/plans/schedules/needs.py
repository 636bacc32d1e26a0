"""What the ranks need of each other's rows, found for all pairs of ranks at once.

A plan of one rank asks who else needs a block, and the choice of a schedule what every rank would
send. Both look at all pairs of ranks, so they are made of arrays here, and not of tiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.plan import Kind, Part
from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plans.visibility.visible import Visible


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
        count, of = len(seen.counts), np.repeat(np.arange(len(seen.counts)), seen.counts)
        pairs = seen.sums(seen.cells.pairs)[seen.kinds]
        away = ~np.eye(len(pairs), dtype=bool)
        rows, once, parts, ends = {}, {}, {}, {}
        sides = (
            (Kind.KV, seen.kinds.T, seen.cells.keys),
            (Kind.QUERY, seen.kinds, seen.cells.queries),
        )
        for kind, by_owner, (first, stop) in ((k, n, needed.T) for k, n, needed in sides):
            union = _union(of, first, stop, count, local)
            once[kind] = (union == seen.sums(stop - first))[by_owner] | ~away
            rows[kind] = (union if mask.is_sparse else local * (union > 0))[by_owner]
            parts[kind] = np.zeros((len(pairs), 2), np.int64)
            if mask.is_sparse:
                low, high = np.full(count, local), np.zeros(count, np.int64)
                np.minimum.at(low, of, first)
                np.maximum.at(high, of, stop)
                low, high = np.where(away, low[by_owner], local), np.where(away, high[by_owner], 0)
                ends[kind] = np.stack([low, high])
                parts[kind] = _inside(low.min(axis=1), high.max(axis=1), local)
        return cls(pairs, seen.cells.is_banded, once, rows, parts, ends, local)

    def parts_of(self, kind: Kind, groups: Ints) -> Ints:
        """Return the `parts` that users need together, [group, owner, 2], of [group, user]."""
        low, high = self.ends[kind][:, :, groups]  # [owner, group, user]
        return _inside(low.min(axis=2).T, high.max(axis=2).T, self.local)

    def users(self, kind: Kind) -> NDArray[np.bool]:
        """Return which ranks have a use for the KV or QUERY block of another: [owner, user]."""
        seen = self.pairs.T if kind is Kind.KV else self.pairs
        return (seen > 0) & ~np.eye(len(seen), dtype=bool)


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
