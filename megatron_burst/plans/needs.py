"""What the ranks need of each other's rows, found for all pairs of ranks at once.

A plan of one rank asks who else needs a block, and the choice of a schedule what every rank would
send. Both look at all pairs of ranks, so they are made of arrays here, and not of tiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.cells import FAR, Cells, Ints
from megatron_burst.plans.kinds import Kinds
from megatron_burst.plans.layout import Interval, Layout
from megatron_burst.plans.mask import FULLY, Mask
from megatron_burst.plans.pieces import Pieces
from megatron_burst.plans.plan import Kind, Part

_QUERIES = 512  # how many pieces are looked at at once


@dataclass(frozen=True, slots=True)
class Needs:
    """How much the queries of a rank see of the keys of another, for all pairs of ranks."""

    pairs: Ints
    """[query owner, key owner]: how many pairs of tokens the mask lets through."""
    is_banded: bool
    """Whether any rank has tiles that are neither full nor causal squares."""
    once: Mapping[Kind, NDArray[np.bool]]
    """[owner, user]: whether it is known that no row of a KV or QUERY block is in two tiles of a
    user, so that what kernels return of its gradient is no sum."""
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
    def of_cells(
        cls, cells: Cells, of: Ints, numbers: NDArray[np.integer], mask: Mask, local: int
    ) -> "Needs":
        """Return them, given the cells of each kind of pairs of ranks.

        Args:
            cells: of all kinds.
            of: the number of each cell's kind.
            numbers: of the kinds, [query owner, key owner].
            mask: without one beside causality a rank needs all rows of a block or none.
            local: the rows of a rank.
        """
        count = int(numbers.max()) + 1
        pairs = np.bincount(of, cells.pairs, count).astype(np.int64)[numbers]
        away = ~np.eye(len(pairs), dtype=bool)
        rows, once, parts, ends = {}, {}, {}, {}
        sides = (Kind.KV, numbers.T, cells.keys), (Kind.QUERY, numbers, cells.queries)
        for kind, by_owner, (first, stop) in ((k, n, needed.T) for k, n, needed in sides):
            every = _rows(of, first, stop, count, local)
            once[kind] = (every == np.bincount(of, stop - first, count))[by_owner] | ~away
            rows[kind] = (every if mask.is_sparse else local * (every > 0))[by_owner]
            parts[kind] = np.zeros((len(pairs), 2), np.int64)
            if mask.is_sparse:
                low, high = np.full(count, local), np.zeros(count, np.int64)
                np.minimum.at(low, of, first)
                np.maximum.at(high, of, stop)
                low, high = np.where(away, low[by_owner], local), np.where(away, high[by_owner], 0)
                ends[kind] = np.stack([low, high])
                parts[kind] = _inside(low.min(axis=1), high.max(axis=1), local)
        return cls(pairs, cells.is_banded, once, rows, parts, ends, local)

    def parts_of(self, kind: Kind, groups: Ints) -> Ints:
        """Return the `parts` that users need together, [group, owner, 2], of [group, user]."""
        low, high = self.ends[kind][:, :, groups]  # [owner, group, user]
        return _inside(low.min(axis=2).T, high.max(axis=2).T, self.local)

    def users(self, kind: Kind) -> NDArray[np.bool]:
        """Return which ranks have a use for the KV or QUERY block of another: [owner, user]."""
        seen = self.pairs.T if kind is Kind.KV else self.pairs
        return (seen > 0) & ~np.eye(len(seen), dtype=bool)


def needs_of_kinds(kinds: Kinds, cells: Sequence[Cells], mask: Mask, local: int) -> Needs:
    """Return what ranks need of each other's rows, given the cells of each kind of pairs."""
    of = np.repeat(np.arange(len(cells)), [*map(len, cells)])
    return Needs.of_cells(Cells.joined(cells), of, kinds.numbers, mask, local)


def needs_of(pieces: Pieces, mask: Mask, layout: Layout) -> Needs:
    """Return what the ranks that hold these pieces need of each other's rows."""
    ranks, every = layout.ranks, pieces[np.argsort(pieces.starts)]
    begins = range(0, len(every.owner), _QUERIES)
    seen = [_seen(every, begin, mask, layout.tokens) for begin in begins]
    piece, query_owner, key_owner = np.concatenate([of for of, _ in seen], axis=1)
    cells, numbers = Cells.joined([x for _, x in seen]), np.arange(ranks**2).reshape(ranks, ranks)
    of, cells = _joined(query_owner * ranks + key_owner, piece, cells)
    return Needs.of_cells(cells, of, numbers, mask, layout.local_tokens)


def _seen(every: Pieces, begin: int, mask: Mask, tokens: int) -> tuple[Ints, Cells]:
    """Return what some pieces of queries see, from piece `begin` on, cell by cell.

    With the number of the piece, the owner of its queries and that of the keys: [3, cell].
    """
    queries = every[begin : begin + _QUERIES]
    low, high = mask.reach(int(queries.starts[0]), int(queries.lasts.max()))
    keys = every[(every.lasts >= low) & (every.starts <= high)]
    table = mask.overview(queries.bounds, keys.bounds, tokens)
    q, k = np.nonzero(table)
    queries, keys = queries[q], keys[k]
    is_seen, cells = _cut(queries, keys, mask, table[q, k] == FULLY)
    return np.stack([begin + q, queries.owner, keys.owner])[:, is_seen], cells


def _cut(
    queries: Pieces, keys: Pieces, mask: Mask, is_full: NDArray[np.bool]
) -> tuple[NDArray[np.bool], Cells]:
    """Return what causality and a window leave of pairs of pieces: `Band.cut` of all at once.

    Before it whether anything is left of each pair.
    """
    distance, step = queries.starts - keys.starts, queries.step
    rows, columns = queries.stop - queries.first, keys.stop - keys.first
    right = np.where(is_full | (not mask.is_causal), FAR, distance // step)
    left = np.where(is_full | (mask.window is None), FAR, ((mask.window or 0) - distance) // step)
    first, key_stop = np.maximum(0, -right), np.minimum(columns, rows + right)
    key_first, stop = np.maximum(0, first - left), np.minimum(rows, key_stop + left)
    seen = (left + right >= 0) & (stop > first) & (key_stop > key_first)
    ends = (
        queries.first + first,
        queries.first + stop,
        keys.first + key_first,
        keys.first + key_stop,
    )
    sides = left + key_first - first, right - key_first + first
    return seen, Cells(np.stack(ends, axis=1)[seen], np.stack(sides, axis=1)[seen])


def _joined(of: Ints, pieces: Ints, cells: Cells) -> tuple[Ints, Cells]:
    """Join full cells as `Tiling` does: neighbouring keys, then queries that see these alone."""
    if not len(cells):
        return of, cells
    order = np.lexsort((cells.keys[:, 0], pieces, of))
    of, pieces, cells = of[order], pieces[order], cells.some(order)
    kept, cells = _neighbours_joined(of, cells, slice(0, 2), _are_full(cells))
    of, pieces = of[kept], pieces[kept]
    new = np.append(True, (np.diff(of) != 0) | (np.diff(pieces) != 0))
    is_alone = new & np.append(new[1:], True)  # else they see more than one run of keys
    order = np.lexsort((cells.queries[:, 0], cells.keys[:, 0], of))
    of, cells, may = of[order], cells.some(order), (_are_full(cells) & is_alone)[order]
    kept, cells = _neighbours_joined(of, cells, slice(2, 4), may)
    return of[kept], cells


def _are_full(cells: Cells) -> NDArray[np.bool]:
    return (cells.sides == FAR).all(axis=1)


def _neighbours_joined(
    of: Ints, cells: Cells, same: slice, may: NDArray[np.bool]
) -> tuple[Ints, Cells]:
    """Join each with the one before it that has the `same` rows, if the others go on there.

    Before the joined ones the number of the first cell that each is made of.
    """
    rows, other = cells.rows, slice(2 - same.start, 4 - same.start)
    goes_on = (of[1:] == of[:-1]) & (rows[1:, same] == rows[:-1, same]).all(axis=1)
    goes_on &= (rows[1:, other.start] == rows[:-1, other.stop - 1]) & may[1:] & may[:-1]
    first = np.flatnonzero(np.append(True, ~goes_on))
    joined = cells.some(first)
    joined.rows[:, other.stop - 1] = rows[np.append(first[1:], len(rows)) - 1, other.stop - 1]
    return first, joined


def _rows(pair: Ints, first: Ints, stop: Ints, count: int, local: int) -> Ints:
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
