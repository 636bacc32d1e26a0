"""What the ranks need of each other's rows, found for all pairs of ranks at once.

A plan of one rank asks who else needs a block, and the choice of a schedule what every rank would
send. Both look at all pairs of ranks, so they are made of arrays here, and not of tiles.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from megatron_burst.plans.schedules.plan import Kind, Part
from megatron_burst.plans.visibility.band import Bools, Ints
from megatron_burst.plans.visibility.cells import Cells
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.kinds import Kinds, Visible
from megatron_burst.plans.visibility.mask import Mask

type _Rows = Callable[[Cells], Ints]  # those of the queries or the keys of each: [cell, 2]


@dataclass(frozen=True, slots=True)
class Needs:
    """How much the queries of a rank see of the keys of another, for all pairs of ranks."""

    pairs: Ints
    """[query owner, key owner]: how many pairs of tokens the mask lets through."""
    is_banded: bool
    """Whether any rank has tiles that are neither full nor causal squares."""
    once: Mapping[Kind, Bools]
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
        for kind, name in ((Kind.KV, "keys"), (Kind.QUERY, "queries")):
            of_cells = attrgetter(name)
            union = seen.for_pairs(partial(_union, of_cells, local))
            in_tiles = seen.sums(partial(_rows, of_cells))
            once[kind] = _by_owner(kind, union == in_tiles) | ~away
            union = _by_owner(kind, union)
            rows[kind] = union if mask.is_sparse else local * (union > 0)
            parts[kind] = np.zeros((len(pairs), 2), np.int64)
            if mask.is_sparse:
                low = seen.for_pairs(partial(_first, of_cells, local), np.minimum)
                high = seen.for_pairs(partial(_stop, of_cells), np.maximum)
                low = np.where(away, _by_owner(kind, low), local)
                high = np.where(away, _by_owner(kind, high), 0)
                ends[kind] = np.stack([low, high])
                parts[kind] = _inside(low.min(axis=1), high.max(axis=1), local)
        is_banded = any(part.cells.is_banded for part in seen.parts)
        return cls(pairs, is_banded, once, rows, parts, ends, local)

    def parts_of(self, kind: Kind, groups: Ints) -> Ints:
        """Return the `parts` that users need together, [group, owner, 2], of [group, user]."""
        low, high = self.ends[kind][:, :, groups]  # [owner, group, user]
        return _inside(low.min(axis=2).T, high.max(axis=2).T, self.local)

    def users(self, kind: Kind) -> Bools:
        """Return which ranks have a use for the KV or QUERY block of another: [owner, user]."""
        seen = self.pairs.T if kind is Kind.KV else self.pairs
        return (seen > 0) & ~np.eye(len(seen), dtype=bool)


def _by_owner(kind: Kind, values: Any) -> Any:
    """Turn [query owner, key owner] into [owner, user] of a block."""
    return values.T if kind is Kind.KV else values


def _rows(of_cells: _Rows, cells: Cells) -> Ints:
    return np.diff(of_cells(cells))[:, 0]


def _union(of_cells: _Rows, local: int, part: Kinds) -> Ints:
    """Return how many rows pairs of ranks need, of each kind: the union of those of its cells."""
    of, (first, stop) = part.of_cells, of_cells(part.cells).T
    order = np.lexsort((first, of))
    of = of[order]
    begins, ends = first[order] + of * local, stop[order] + of * local
    reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    new = np.maximum(0, ends - np.maximum(begins, reached))
    return np.bincount(of, new, len(part.counts)).astype(np.int64)


def _first(of_cells: _Rows, local: int, part: Kinds) -> Ints:
    low = np.full(len(part.counts), local)
    np.minimum.at(low, part.of_cells, of_cells(part.cells)[:, 0])
    return low


def _stop(of_cells: _Rows, part: Kinds) -> Ints:
    high = np.zeros(len(part.counts), np.int64)
    np.maximum.at(high, part.of_cells, of_cells(part.cells)[:, 1])
    return high


def _inside(low: Ints, high: Ints, local: int) -> Ints:
    """Return the ends of parts, [..., 2]: 0 and 0 for all rows, and for none."""
    ends, size = np.stack([low, high], axis=-1), high - low
    return np.where(((size > 0) & (size < local))[..., None], ends, 0)


def part_of(ends: Ints) -> Part:
    """Return the rows between two ends; () for all of them."""
    start, stop = ends.tolist()
    return (Interval(start, stop),) if stop else ()
