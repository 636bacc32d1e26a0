"""Which tiles of a step one kernel call computes: as few calls as there are windows, if it can be.

Documents and sparse block masks make hundreds of small tiles, and each call costs its launch.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_burst.plans.layout import Interval, joined
from megatron_burst.plans.mask import Band
from megatron_burst.plans.plan import Tile

_FEW = 2  # tiles that need not share a call: two large ones gain nothing


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """Tiles of one query block and one key block that a kernel computes together.

    They make up sequences, some rows of queries that see some rows of keys. No row is in two of
    them, so that what comes of the call is added by rows, in any order, to the same sums.
    """

    tile: Tile
    """Any of them, for the blocks."""
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

    @property
    def lengths(self) -> tuple[int, int]:
        return _rows(self.queries), _rows(self.keys)


def calls_of(tiles: Iterable[Tile]) -> tuple[KernelCall, ...]:
    """Return the kernel calls that compute these tiles, those of a pair of blocks one by one."""
    of_blocks: dict[object, list[Tile]] = defaultdict(list)
    for tile in tiles:
        of_blocks[tile.blocks].append(tile)
    return tuple(call for some in of_blocks.values() for call in _calls(some))


def _calls(tiles: Sequence[Tile]) -> list[KernelCall]:
    """Return those of one pair of blocks, the one of the most queries first.

    What comes of the first stays as it is where it is all that there is of a block.
    """
    if len(tiles) <= _FEW:
        return [_call([_Sequence((t.query_slice,), (t.key_slice,))], _corner(t), t) for t in tiles]
    calls = [
        _call(some, band, tiles[0])
        for band, sequences in _by_band(tiles).items()
        for some in _disjoint(sequences)
    ]
    return sorted(calls, key=lambda call: -_rows(call.queries))


def _call(sequences: Sequence[_Sequence], band: Band, tile: Tile) -> KernelCall:
    lengths = tuple(sequence.lengths for sequence in sequences)
    if len(lengths) == 1:
        band = band.of_corner(*lengths[0])
    queries = (rows for sequence in sequences for rows in sequence.queries)
    keys = (rows for sequence in sequences for rows in sequence.keys)
    return KernelCall(tile, band, _runs(queries), _runs(keys), lengths)


def _corner(tile: Tile) -> Band:
    """Return the band that a square with the tile's window has."""
    return Band(*tile.band.window(tile.query_rows.length, tile.key_rows.length))


def _sides(band: Band) -> tuple[float, float]:
    left, right = (math.inf if side is None else side for side in (band.left, band.right))
    return left, right


def _by_band(tiles: Sequence[Tile]) -> dict[Band, list[_Sequence]]:
    """Return sequences by the band that a square would have.

    A square goes with the narrowest window that hides no more of it: under a window of 1000 the
    short documents, which are causal, go with the long ones.
    """
    narrow = sorted({_corner(tile) for tile in tiles}, key=_sides)
    by_band: dict[Band, list[Tile]] = defaultdict(list)
    for tile in tiles:
        rows, band = tile.query_rows.length, _corner(tile)
        if rows == tile.key_rows.length:
            band = next(other for other in narrow if other.of_corner(rows, rows) == tile.band)
        by_band[band].append(tile)
    return {
        band: [*_full(some)]
        if band == Band.FULL
        else [_Sequence((tile.query_slice,), (tile.key_slice,)) for tile in some]
        for band, some in by_band.items()
    }


def _full(tiles: Iterable[Tile]) -> Iterator[_Sequence]:
    """Join full tiles of the same queries, then those queries that see the same keys."""
    keys_of: dict[Interval, list[Interval]] = defaultdict(list)
    for tile in tiles:
        keys_of[tile.query_slice].append(tile.key_slice)
    queries_of: dict[tuple[Interval, ...], list[Interval]] = defaultdict(list)
    for queries, keys in keys_of.items():
        queries_of[tuple(joined(keys))].append(queries)
    return (_Sequence(tuple(joined(some)), keys) for keys, some in queries_of.items())


def _disjoint(sequences: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
    """Deal sequences, in the order of their rows, to lists in which no two share a row."""
    lists: list[_Disjoint] = []
    for sequence in sorted(sequences):
        chosen = next((some for some in lists if some.has_room_for(sequence)), None)
        if chosen is None:
            lists.append(chosen := _Disjoint())
        chosen.add(sequence)
    return (some.sequences for some in lists)


class _Disjoint:
    """Sequences that share no row, and which rows are taken: a byte each."""

    def __init__(self) -> None:
        self.sequences: list[_Sequence] = []
        self._taken = bytearray(), bytearray()

    def has_room_for(self, sequence: _Sequence) -> bool:
        sides = zip(self._taken, sequence, strict=True)
        return all(taken.find(1, *some) < 0 for taken, rows in sides for some in rows)

    def add(self, sequence: _Sequence) -> None:
        self.sequences.append(sequence)
        for taken, rows in zip(self._taken, sequence, strict=True):
            taken.extend(bytes(max(0, max(some.stop for some in rows) - len(taken))))
            for some in rows:
                taken[some.rows] = b"\1" * some.length


def _runs(rows: Iterable[Interval]) -> tuple[Interval, ...]:
    """Join intervals that follow each other, in their order."""
    runs: list[Interval] = []
    for some in rows:
        if runs and runs[-1].stop == some.start:
            some = Interval(runs.pop().start, some.stop)
        runs.append(some)
    return tuple(runs)


def _rows(intervals: Iterable[Interval]) -> int:
    return sum(rows.length for rows in intervals)
