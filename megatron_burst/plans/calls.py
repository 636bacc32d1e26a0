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
        blocks = tile.query_owner, tile.query_part, tile.key_owner, tile.key_part
        of_blocks[blocks].append(tile)
    return tuple(call for some in of_blocks.values() for call in _calls(some))


def _calls(tiles: Sequence[Tile]) -> list[KernelCall]:
    """Return those of one pair of blocks, the one of the most queries first.

    What comes of the first stays as it is where it is all that there is of a block.
    """
    if len(tiles) <= _FEW:
        return [_call([_alone(tile)], _corner(tile), tile) for tile in tiles]
    calls = [
        _call(some, band, tiles[0])
        for band, alike in _by_band(tiles).items()
        for some in (_of_full(alike) if band == Band.FULL else _disjoint(map(_alone, alike)))
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


def _by_band(tiles: Sequence[Tile]) -> dict[Band, list[Tile]]:
    """Return tiles by the band that a square would have.

    A square goes with the narrowest window that hides no more of it: under a window of 1000 the
    short documents, which are causal, go with the long ones.
    """
    narrow = sorted({_corner(tile) for tile in tiles}, key=_sides)
    by_band: dict[Band, list[Tile]] = defaultdict(list)
    for tile in tiles:
        rows, band = tile.query_rows.length, _corner(tile)
        if len(narrow) > 1 and rows == tile.key_rows.length:
            band = next(other for other in narrow if other.of_corner(rows, rows) == tile.band)
        by_band[band].append(tile)
    return by_band


def _alone(tile: Tile) -> _Sequence:
    return _Sequence((tile.query_slice,), (tile.key_slice,))


def _of_full(tiles: Sequence[Tile]) -> list[list[_Sequence]]:
    """Join full tiles by their queries or by their keys, whichever makes fewer lists."""
    found = _disjoint(_joined(tiles, by_keys=False))
    if len(found) == 1:
        return found
    return min(found, _disjoint(_joined(tiles, by_keys=True)), key=len)


def _joined(tiles: Iterable[Tile], *, by_keys: bool) -> Iterator[_Sequence]:
    """Join full tiles of the same queries, then the queries that see the same keys.

    Or the other way round: of the same keys, then the keys that the same queries see.
    """
    met: dict[Interval, list[Interval]] = defaultdict(list)
    for tile in tiles:
        queries, keys = tile.query_slice, tile.key_slice
        met[keys if by_keys else queries].append(queries if by_keys else keys)
    alike: dict[tuple[Interval, ...], list[Interval]] = defaultdict(list)
    for rows, others in met.items():
        alike[tuple(joined(others))].append(rows)
    for others, some in alike.items():
        both = tuple(joined(some)), others
        yield _Sequence(*reversed(both)) if by_keys else _Sequence(*both)


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
    return sum((1 << some.stop) - (1 << some.start) for some in rows)


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
