"""Which tiles of a step one kernel call computes: as few calls as there are windows, if it can be.

Documents and sparse block masks make hundreds of small tiles, and each call costs its launch.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.schedules.plan import Tiles
from megatron_burst.plans.visibility.band import FAR, Band, Ints, least_tiles
from megatron_burst.plans.visibility.cells import Cells
from megatron_burst.plans.visibility.interval import Interval, union_of

_FEW = 2  # tiles that need not share a call: two large ones gain nothing


@dataclass(frozen=True, slots=True, eq=False)
class TileBatch:
    """Tiles of one query block and one key block that a kernel computes together.

    They make up sequences, some rows of queries that see some rows of keys. No row is in two of
    them, so that what comes of the call is added by rows, in any order, to the same sums.
    """

    tile: Tiles
    """Of the blocks."""
    band: Band
    """Of several sequences that of a square: each one's, counted from its last corner."""
    queries: tuple[Interval, ...]
    """Rows of the query block, in the order in which the kernel has them."""
    keys: tuple[Interval, ...]
    """The same of the key block."""
    lengths: tuple[tuple[int, int], ...]
    """Of each sequence, how many of these rows are its queries and its keys."""


class _Sequence(NamedTuple):
    queries: tuple[Interval, ...]
    keys: tuple[Interval, ...]


type Known = dict[tuple[object, ...], tuple[Tiles, list[TileBatch]]]
"""The calls of blocks that were seen, by their cells, which they keep alive."""


def batches_of(blocks: Iterable[Tiles], known: Known | None = None) -> tuple[TileBatch, ...]:
    """Return the kernel calls that compute the tiles of pairs of blocks, one pair after the other.

    What is `known` is not found again: of blocks that have the same cells.
    """
    known = {} if known is None else known
    calls: list[TileBatch] = []
    for tiles in filter(len, blocks):
        key = id(tiles.cells), tiles.query_part, tiles.key_part
        if key not in known:
            known[key] = tiles, _calls(tiles)
        calls += (replace(call, tile=tiles) for call in known[key][1])
    return tuple(calls)


def _calls(tiles: Tiles) -> list[TileBatch]:
    """Return those of one pair of blocks, the one of the most queries first.

    What comes of the first stays as it is where it is all that there is of a block.
    """
    cells = _none_too_tall(tiles.slices)
    if len(cells) <= _FEW:
        return [
            TileBatch(tiles, band, (queries,), (keys,), ((queries.length, keys.length),))
            for queries, keys, band in cells
        ]
    calls = [call for alike in _by_band(cells) for call in _of_band(tiles, *alike)]
    return sorted(calls, key=lambda call: -_length(call.queries))


def _none_too_tall(cells: Cells) -> Cells:
    """Cut cells in which FlashAttention-2 would hide pairs (flash-attention 895).

    Beside a window's limit on one side, it takes the number of keys for no limit on the other: so
    query i sees no key after i + 2 · keys - queries. A cell is cut into the queries that see all
    keys, those before them, which do not see the last, and those after, which miss the first.
    """
    queries, keys = cells.sizes.T
    left, right = cells.sides.T
    is_tall = ~cells.are_full & (queries + np.minimum(right, keys - 1) >= 2 * keys)
    if not is_tall.any():
        return cells
    tall = cells.select(is_tall)
    begin, end = np.clip([keys - 1 - right, left + 1], 0, queries)[:, is_tall]
    ends = np.stack([np.zeros_like(begin), begin, end, tall.sizes[:, 0]])
    of_keys = np.zeros_like(begin), tall.sizes[:, 1]
    parts = [np.stack([*of_queries, *of_keys], axis=1) for of_queries in pairwise(ends)]
    is_seen, rows, sides = least_tiles(np.concatenate(parts), np.tile(tall.sides, (3, 1)))
    rows += np.tile(tall.rows[:, ::2].repeat(2, axis=1), (3, 1))
    return Cells.concatenate([cells.select(~is_tall), Cells(rows, sides).select(is_seen)])


def _by_band(cells: Cells) -> Iterator[tuple[Band, Cells]]:
    """Group cells by the band that a square would have, counted from its last corner.

    A square goes with the narrowest window that hides no more of it: under a window of 1000 the
    short documents, which are causal, go with the long ones.
    """
    rows, keys = cells.sizes.T
    shift = np.stack([keys - rows, rows - keys], axis=1)
    corners = np.where(cells.sides < FAR, cells.sides + shift, FAR)
    narrow, number = np.unique(corners, axis=0, return_inverse=True)
    number = number.ravel()
    if len(narrow) > 1:
        of_square = np.where(narrow < rows[:, None, None] - 1, narrow, FAR)  # [cell, band, side]
        first = (of_square == cells.sides[:, None]).all(axis=2).argmax(axis=1)
        number = np.where(rows == keys, first, number)
    for which in np.unique(number).tolist():
        yield Band.of_sides(*narrow[which].tolist()), cells.select(number == which)


def _of_band(tile: Tiles, band: Band, cells: Cells) -> Iterator[TileBatch]:
    """Make calls of cells of one band, so that no row is in two of a call's."""
    queries, keys = cells.queries, cells.keys
    order = queries[:, 0].argsort()
    if _share_no_row(queries) and _share_no_row(keys):
        lengths = [(q, k) for q, k in cells.sizes[order].tolist()]
        yield _call(tile, band, queries[order], keys[order], lengths)
        return
    ends = zip(queries.tolist(), keys.tolist(), strict=True)
    sequences = [_Sequence((Interval(*q),), (Interval(*k),)) for q, k in ends]
    for group in _of_full(sequences) if band == Band.FULL else _disjoint(sequences):
        lengths = [(_length(queries), _length(keys)) for queries, keys in group]
        queries, keys = (
            np.array([run for side in sides for run in side]) for sides in zip(*group, strict=True)
        )
        yield _call(tile, band, queries, keys, lengths)


def _call(
    tile: Tiles, band: Band, queries: Ints, keys: Ints, lengths: Sequence[tuple[int, int]]
) -> TileBatch:
    if len(lengths) == 1:
        band = band.of_corner(*lengths[0])
    return TileBatch(tile, band, _runs(queries), _runs(keys), tuple(lengths))


def _share_no_row(rows: Ints) -> bool:
    ordered = rows[rows[:, 0].argsort()]
    return bool((ordered[:-1, 1] <= ordered[1:, 0]).all())


def _of_full(sequences: Sequence[_Sequence]) -> list[list[_Sequence]]:
    """Join full ones by their queries or by their keys, whichever makes fewer lists."""
    by_queries = _disjoint(_join(sequences, by_keys=False))
    if len(by_queries) == 1:
        return by_queries
    return min(by_queries, _disjoint(_join(sequences, by_keys=True)), key=len)


def _join(sequences: Iterable[_Sequence], *, by_keys: bool) -> Iterator[_Sequence]:
    """Join full ones of the same queries, then the queries that see the same keys.

    Or the other way round: of the same keys, then the keys that the same queries see.
    """
    met: dict[Interval, list[Interval]] = defaultdict(list)
    for (queries,), (keys,) in sequences:
        met[keys if by_keys else queries].append(queries if by_keys else keys)
    alike: dict[tuple[Interval, ...], list[Interval]] = defaultdict(list)
    for own, others in met.items():
        alike[tuple(union_of(others))].append(own)
    for seen, every in alike.items():
        both = seen, tuple(union_of(every))
        yield _Sequence(*both) if by_keys else _Sequence(*reversed(both))


def _disjoint(sequences: Iterable[_Sequence]) -> list[list[_Sequence]]:
    """Deal sequences, in the order of their rows, to lists in which no two share a row."""
    lists: list[list[_Sequence]] = []
    taken: list[tuple[int, int]] = []  # which rows of queries and of keys: a bit each
    for sequence in sorted(sequences):
        queries, keys = _bits(sequence.queries), _bits(sequence.keys)
        room = (i for i, (q, k) in enumerate(taken) if not (q & queries or k & keys))
        if (number := next(room, len(lists))) == len(lists):
            lists.append([])
            taken.append((0, 0))
        lists[number].append(sequence)
        taken[number] = taken[number][0] | queries, taken[number][1] | keys
    return lists


def _bits(rows: Iterable[Interval]) -> int:
    return sum((1 << run.stop) - (1 << run.start) for run in rows)


def _runs(rows: Ints) -> tuple[Interval, ...]:
    """Join intervals that follow each other, in their order."""
    first = np.flatnonzero(np.append(True, rows[1:, 0] != rows[:-1, 1]))
    last = np.append(first[1:], len(rows)) - 1
    ends = rows[first, 0].tolist(), rows[last, 1].tolist()
    return tuple(map(Interval, *ends))


def _length(intervals: Iterable[Interval]) -> int:
    return sum(interval.length for interval in intervals)
