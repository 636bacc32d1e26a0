"""What the ranks need of each other's rows, found for all pairs of ranks at once.

A plan of one rank asks who else needs a block, and the choice of a schedule what every rank would
send. Both look at all pairs of ranks, so they are made of arrays here, and not of tiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.kinds import Kinds
from megatron_burst.plans.layout import Interval, Layout, joined
from megatron_burst.plans.mask import FULLY, Mask
from megatron_burst.plans.pieces import Pieces
from megatron_burst.plans.plan import Kind, Tile

type _Ints = NDArray[np.int64]

_QUERIES = 512  # how many pieces are looked at at once
_FAR = 2**40  # a side of a band that hides nothing


@dataclass(frozen=True, slots=True)
class Needs:
    """How much the queries of a rank see of the keys of another, for all pairs of ranks."""

    pairs: _Ints
    """[query owner, key owner]: how many pairs of tokens the mask lets through."""
    is_banded: bool
    """Whether any rank has tiles that are neither full nor causal squares."""
    has_single_tiles: bool
    """Whether it is known that what two ranks need of each other is at most one tile each way."""
    rows: Mapping[Kind, _Ints]
    """[owner, user]: how many rows of a KV or QUERY block a rank needs."""
    parts: Mapping[Kind, Sequence[Interval | None]]
    """By owner: from the first to the last row that any other rank needs; None for all or none."""

    @classmethod
    def of_whole_blocks(cls, pairs: _Ints, is_banded: bool, single: bool, local: int) -> "Needs":
        """Return them where a rank needs all rows of a block or none."""
        needed = np.where(pairs > 0, local, 0)
        rows = {Kind.KV: needed.T, Kind.QUERY: needed}
        return cls(pairs, is_banded, single, rows, dict.fromkeys(rows, [None] * len(pairs)))

    @classmethod
    def of_kinds(
        cls, kinds: Kinds, tiles: Sequence[Sequence[Tile]], mask: Mask, local: int
    ) -> "Needs":
        """Return them, given the tiles of each kind of pairs of ranks."""
        pairs = np.array([sum(tile.pairs for tile in some) for some in tiles])[kinds.numbers]
        is_banded = any(tile.is_banded for some in tiles for tile in some)
        others = np.unique(kinds.numbers[~np.eye(len(pairs), dtype=bool)])
        single = all(len(tiles[number]) <= 1 for number in others)
        if not mask.is_sparse:
            return cls.of_whole_blocks(pairs, is_banded, single, local)
        rows, parts = {}, {}
        for kind, numbers in (Kind.KV, kinds.numbers.T), (Kind.QUERY, kinds.numbers):
            needed = [joined(tile.rows_of(kind) for tile in some) for some in tiles]
            rows[kind] = np.array([sum(part.length for part in some) for some in needed])[numbers]
            ends = [(some[0].start, some[-1].stop) if some else (local, 0) for some in needed]
            low, high = np.array(ends)[numbers].transpose(2, 0, 1)
            np.fill_diagonal(low, local)
            np.fill_diagonal(high, 0)
            parts[kind] = _inside(low.min(axis=1), high.max(axis=1), local)
        return cls(pairs, is_banded, single, rows, parts)

    def users(self, kind: Kind) -> NDArray[np.bool]:
        """Return which ranks have a use for the KV or QUERY block of another: [owner, user]."""
        seen = self.pairs.T if kind is Kind.KV else self.pairs
        return (seen > 0) & ~np.eye(len(seen), dtype=bool)


def needs_of(pieces: Pieces, mask: Mask, layout: Layout) -> Needs:
    """Return what the ranks that hold these pieces need of each other's rows.

    Without a mask beside causality a rank needs all rows of a block or none.
    """
    ranks, local, every = layout.ranks, layout.local_tokens, pieces[np.argsort(pieces.starts)]
    pairs, is_banded = np.zeros(ranks * ranks), False
    kept: list[_Cells] = []
    for begin in range(0, len(every.owner), _QUERIES):
        cells, some_banded = _seen(every, begin, mask, layout.tokens)
        pairs += np.bincount(cells.query_owner * ranks + cells.key_owner, cells.pairs, ranks**2)
        is_banded |= some_banded
        kept.append(cells)
    seen = pairs.astype(np.int64).reshape(ranks, ranks)
    if not mask.is_sparse:
        return Needs.of_whole_blocks(seen, is_banded, False, local)
    cells = _Cells(*map(np.concatenate, zip(*kept, strict=True)))
    of_keys = cells.key_owner, cells.query_owner, cells.first_key, cells.stop_key
    of_queries = cells.query_owner, cells.key_owner, cells.first_query, cells.stop_query
    sides = {Kind.KV: of_keys, Kind.QUERY: of_queries}
    rows = {kind: _rows(*side, ranks=ranks, local=local) for kind, side in sides.items()}
    parts = {kind: _parts(*side, ranks=ranks, local=local) for kind, side in sides.items()}
    return Needs(seen, is_banded, False, rows, parts)


class _Cells(NamedTuple):
    """What pieces of queries see of pieces of keys, in local rows: arrays of one length."""

    query_owner: _Ints
    key_owner: _Ints
    first_query: _Ints
    stop_query: _Ints
    first_key: _Ints
    stop_key: _Ints
    pairs: _Ints


def _seen(every: Pieces, begin: int, mask: Mask, tokens: int) -> tuple[_Cells, bool]:
    """Return what some pieces of queries see, from piece `begin` on; is any of it banded?"""
    queries = every[begin : begin + _QUERIES]
    low, high = mask.reach(int(queries.starts[0]), int(queries.lasts.max()))
    keys = every[(every.lasts >= low) & (every.starts <= high)]
    table = mask.overview(queries.bounds, keys.bounds, tokens)
    q, k = np.nonzero(table)
    return _cut(queries[q], keys[k], mask, table[q, k] == FULLY)


def _cut(
    queries: Pieces, keys: Pieces, mask: Mask, is_full: NDArray[np.bool]
) -> tuple[_Cells, bool]:
    """Return what causality and a window leave of pairs of pieces: `Band.cut` of all at once."""
    distance, step = queries.starts - keys.starts, queries.step
    rows, columns = queries.stop - queries.first, keys.stop - keys.first
    right = np.where(is_full | (not mask.is_causal), _FAR, distance // step)
    left = np.where(is_full | (mask.window is None), _FAR, ((mask.window or 0) - distance) // step)
    first, key_stop = np.maximum(0, -right), np.minimum(columns, rows + right)
    key_first, stop = np.maximum(0, first - left), np.minimum(rows, key_stop + left)
    height, width = stop - first, key_stop - key_first
    above, below = width - 1 - right + key_first - first, height - 1 - left - key_first + first
    pairs = height * width - _triangle(above) - _triangle(below)
    is_square = (height == width) & (right == key_first - first) & (below <= 0)
    seen = (left + right >= 0) & (height > 0) & (width > 0)
    is_banded = seen & ~is_square & ((above > 0) | (below > 0))
    ends = (
        queries.first + first,
        queries.first + stop,
        keys.first + key_first,
        keys.first + key_stop,
    )
    cells = np.stack([queries.owner, keys.owner, *ends, pairs])[:, seen]
    return _Cells(*cells), bool(is_banded.any())


def _triangle(side: _Ints) -> _Ints:
    return np.maximum(side, 0) * (np.maximum(side, 0) + 1) // 2


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
    return _inside(low, high, local)


def _inside(low: _Ints, high: _Ints, local: int) -> list[Interval | None]:
    ends = zip(low.tolist(), high.tolist(), strict=True)
    return [Interval(a, b) if 0 < b - a < local else None for a, b in ends]
