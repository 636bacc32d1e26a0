"""What the ranks need of each other's rows, found for all pairs of ranks at once.

A plan of one rank asks who else needs a block, and the choice of a schedule what every rank would
send. Both look at all pairs of ranks, so they are made of arrays here, and not of tiles.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.layout import Interval, Layout
from megatron_burst.plans.mask import FULLY, PARTLY, Bounds, Mask
from megatron_burst.plans.plan import Kind

type _Ints = NDArray[np.int64]

_QUERIES = 512  # how many pieces are looked at at once


@dataclass(frozen=True, slots=True)
class Pieces:
    """One rank's rows in order, cut so that no piece crosses a border of a document or block."""

    positions: Sequence[range]
    rows: Sequence[Interval]
    starts: _Ints  # the first and the last position of each piece
    lasts: _Ints


@dataclass(frozen=True, slots=True)
class Needs:
    """How much the queries of a rank see of the keys of another, for all pairs of ranks."""

    pairs: _Ints
    """[query owner, key owner]: how many pairs of tokens the mask lets through."""
    is_banded: bool
    """Whether any rank has tiles that are neither full nor causal squares."""
    rows: Mapping[Kind, _Ints]
    """[owner, user]: how many rows of a KV or QUERY block a rank needs."""
    parts: Mapping[Kind, Sequence[Interval | None]]
    """By owner: from the first to the last row that any other rank needs; None for all or none."""

    def users(self, kind: Kind) -> NDArray[np.bool]:
        """Return which ranks have a use for the KV or QUERY block of another: [owner, user]."""
        seen = self.pairs.T if kind is Kind.KV else self.pairs
        return (seen > 0) & ~np.eye(len(seen), dtype=bool)


def cut_pieces(layout: Layout, rank: int, cuts: Sequence[int]) -> Pieces:
    """Cut a rank's ranges of positions at `cuts`, which grow."""
    pieces, rows = [], []
    for positions, local in zip(layout.shards[rank], layout.local_rows(rank), strict=True):
        start = 0
        between = cuts[bisect_left(cuts, positions.start + 1) : bisect_left(cuts, positions.stop)]
        for cut in (*between, positions.stop):
            stop = min(len(positions), -((positions.start - cut) // positions.step))
            if stop > start:
                pieces.append(positions[start:stop])
                rows.append(Interval(local.start + start, local.start + stop))
                start = stop
    starts, lasts = (np.array([piece[i] for piece in pieces], np.int64) for i in (0, -1))
    return Pieces(pieces, rows, starts, lasts)


def needs_of(pieces: Sequence[Pieces], mask: Mask, tokens: int) -> Needs:
    """Return what the ranks that hold these pieces need of each other's rows.

    Without a mask beside causality a rank needs all rows of a block or none.
    """
    ranks, local, every = len(pieces), tokens // len(pieces), _Every.of(pieces)
    pairs, is_banded = np.zeros(ranks * ranks), False
    kept: list[_Cells] = []
    for begin in range(0, len(every.owner), _QUERIES):
        cells, some_banded = every.seen(begin, mask, tokens)
        pairs += np.bincount(cells.query_owner * ranks + cells.key_owner, cells.pairs, ranks**2)
        is_banded |= some_banded
        if mask.is_sparse:
            kept.append(cells)
    seen = pairs.astype(np.int64).reshape(ranks, ranks)
    if not mask.is_sparse:
        needed, whole = np.where(seen > 0, local, 0), [None] * ranks
        blocks = {Kind.KV: needed.T, Kind.QUERY: needed}
        return Needs(seen, is_banded, blocks, dict.fromkeys(blocks, whole))
    cells = _Cells(*map(np.concatenate, zip(*kept, strict=True)))
    of_keys = cells.key_owner, cells.query_owner, cells.first_key, cells.stop_key
    of_queries = cells.query_owner, cells.key_owner, cells.first_query, cells.stop_query
    sides = {Kind.KV: of_keys, Kind.QUERY: of_queries}
    return Needs(
        seen,
        is_banded,
        {kind: _rows(*side, ranks=ranks, local=local) for kind, side in sides.items()},
        {kind: _parts(*side, ranks=ranks, local=local) for kind, side in sides.items()},
    )


class _Cells(NamedTuple):
    """What pieces of queries see of pieces of keys, in local rows: arrays of one length."""

    query_owner: _Ints
    key_owner: _Ints
    first_query: _Ints
    stop_query: _Ints
    first_key: _Ints
    stop_key: _Ints
    pairs: _Ints


@dataclass(frozen=True, slots=True)
class _Every:
    """The pieces of all ranks in the order of the sequence."""

    owner: _Ints
    first: _Ints  # local rows
    stop: _Ints
    starts: _Ints  # positions
    lasts: _Ints
    positions: Sequence[range]

    @classmethod
    def of(cls, pieces: Sequence[Pieces]) -> "_Every":
        """Put together what the ranks hold."""
        starts = np.concatenate([rank.starts for rank in pieces])
        lasts = np.concatenate([rank.lasts for rank in pieces])
        owner = np.repeat(np.arange(len(pieces)), [len(rank.rows) for rank in pieces])
        first, stop = np.array([rows for rank in pieces for rows in rank.rows]).T
        positions = [piece for rank in pieces for piece in rank.positions]
        by = np.argsort(starts)
        in_order = [positions[index] for index in by.tolist()]
        return cls(owner[by], first[by], stop[by], starts[by], lasts[by], in_order)

    def seen(self, begin: int, mask: Mask, tokens: int) -> tuple[_Cells, bool]:
        """Return what some pieces of queries see, from piece `begin` on; is any of it banded?"""
        queries = np.arange(begin, min(begin + _QUERIES, len(self.owner)))
        low, high = mask.reach(int(self.starts[begin]), int(self.lasts[queries].max()))
        keys = np.flatnonzero((self.lasts >= low) & (self.starts <= high))
        table = mask.overview(self._bounds(queries), self._bounds(keys), tokens)
        q, k = np.nonzero(table == FULLY)
        q, k = queries[q], keys[k]
        rows, more = self.stop[q] - self.first[q], self.stop[k] - self.first[k]
        ends = self.first[q], self.stop[q], self.first[k], self.stop[k]
        full = np.stack([self.owner[q], self.owner[k], *ends, rows * more])
        q, k = np.nonzero(table == PARTLY)
        partial, is_banded = self._partial(mask, queries[q].tolist(), keys[k].tolist())
        return _Cells(*np.concatenate([full, partial], axis=1)), is_banded

    def _bounds(self, some: _Ints) -> Bounds:
        return self.starts[some], self.lasts[some]

    def _partial(self, mask: Mask, queries: list[int], keys: list[int]) -> tuple[_Ints, bool]:
        """What causality and a window leave of pieces of which they hide some."""
        owner, first = self.owner.tolist(), self.first.tolist()
        found, is_banded = [], False
        for q, k in zip(queries, keys, strict=True):
            if cell := mask.band(self.positions[q], self.positions[k]):
                rows, more, band = cell
                pairs = band.pairs(rows.length, more.length)
                ends = (*rows.shifted(first[q]), *more.shifted(first[k]))
                found.append((owner[q], owner[k], *ends, pairs))
                is_banded |= band.is_banded(rows.length, more.length)
        return np.array(found, np.int64).reshape(-1, 7).T, is_banded


def _rows(owner: _Ints, user: _Ints, first: _Ints, stop: _Ints, ranks: int, local: int) -> _Ints:
    """How many rows of an owner a user needs [owner, user]: the union of the given ones."""
    pair = owner * ranks + user
    order = np.lexsort((first, pair))
    pair = pair[order]
    begins, ends = first[order] + pair * local, stop[order] + pair * local
    reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    new = np.maximum(0, ends - np.maximum(begins, reached))
    return np.bincount(pair, new, ranks * ranks).astype(np.int64).reshape(ranks, ranks)


def _parts(
    owner: _Ints, user: _Ints, first: _Ints, stop: _Ints, *, ranks: int, local: int
) -> list[Interval | None]:
    """From the first to the last of the given rows that others need; None for all or none."""
    away = owner != user
    low, high = np.full(ranks, local), np.zeros(ranks, np.int64)
    np.minimum.at(low, owner[away], first[away])
    np.maximum.at(high, owner[away], stop[away])
    ends = zip(low.tolist(), high.tolist(), strict=True)
    return [Interval(a, b) if 0 < b - a < local else None for a, b in ends]
