"""Which tiles make up what one rank's queries see of another rank's keys."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.kinds import Kinds, kinds_of
from megatron_burst.plans.layout import Interval, Layout, zigzag
from megatron_burst.plans.mask import FULLY, PARTLY, Band, Mask
from megatron_burst.plans.needs import Needs, needs_of
from megatron_burst.plans.pieces import Pieces, cut_pieces
from megatron_burst.plans.plan import Kind, Tile

_SMALL = 64  # a tile below this part of the pairs is not cut


class _Cell(NamedTuple):
    """What a piece of queries sees of a piece of keys, in local rows."""

    queries: Interval
    keys: Interval
    band: Band


class Tiling:
    """The tiles of every pair of ranks under one layout and mask, made when asked for."""

    def __init__(self, layout: Layout, mask: Mask) -> None:
        mask.check_length(layout.tokens)
        self.layout, self.mask = layout, mask
        self.ranks, self.tokens = layout.ranks, layout.tokens
        self.local_tokens = layout.local_tokens
        self._known: dict[int | tuple[int, int], Sequence[_Cell]] = {}
        self._tiles: dict[tuple[int, int], tuple[Tile, ...]] = {}  # two passes want the same

    def __call__(self, query_owner: int, key_owner: int) -> tuple[Tile, ...]:
        """Return the fewest tiles that cover what one rank's queries see of another's keys.

        Neighbouring rows that see the same share a tile, because few large kernel calls run faster
        than many small ones. Every query of a tile sees at least one of its keys.
        """
        pair = (query_owner, key_owner)
        if pair in self._tiles:
            return self._tiles[pair]
        kind = pair if self.kinds is None else int(self.kinds.numbers[pair])
        if (cells := self._known.get(kind)) is None:
            find = self._found if self._of_one_document is None else self._repeated
            cells = self._known[kind] = find(*pair)
        found = (Tile(*pair, cell.queries, cell.keys, cell.band) for cell in cells)
        self._tiles[pair] = tuple(found)
        return self._tiles[pair]

    def of_block(self, kind: Kind, owner: int, user: int) -> tuple[Tile, ...]:
        """Return what `user` computes with the KV or QUERY block of `owner`."""
        return self(user, owner) if kind is Kind.KV else self(owner, user)

    @cached_property
    def kinds(self) -> Kinds | None:
        """Which pairs of ranks have the same tiles; None where there are too many kinds."""
        if self._of_one_document is not None:
            return self._of_one_document.kinds
        return kinds_of(self._pieces, self.mask, self.ranks, self.tokens)

    @cached_property
    def needs(self) -> Needs:
        """What the ranks need of each other's rows."""
        if self.kinds is None:
            return needs_of(self._pieces, self.mask, self.layout)
        tiles = [self(*pair) for pair in self.kinds.examples]
        return Needs.of_kinds(self.kinds, tiles, self.mask, self.local_tokens)

    @cached_property
    def all_is_needed(self) -> bool:
        """Whether every rank needs all rows of every other."""
        parts = chain(*self.needs.parts.values())
        return bool((self.needs.pairs > 0).all()) and all(part is None for part in parts)

    @cached_property
    def _of_one_document(self) -> "Tiling | None":
        """The tiles of one document of two tokens a chunk, if every document has the same, larger.

        So it is where each is in zigzag by itself, unless a window or padding cuts pieces of it.
        """
        lengths, mask = self.layout.documents, self.mask
        make = Mask.causal if mask.is_causal else Mask.full
        if lengths is None or mask != make(documents=(0, *accumulate(lengths))):
            return None
        return Tiling(zigzag(4 * self.ranks, self.ranks), make())

    @cached_property
    def _pieces(self) -> Pieces:
        return cut_pieces(self.layout, self.mask.cuts(self.tokens))

    @cached_property
    def _begins(self) -> list[int]:
        begins: list[int] = np.searchsorted(self._pieces.owner, range(self.ranks + 1)).tolist()
        return begins

    def _found(self, query_owner: int, key_owner: int) -> Sequence[_Cell]:
        rows = [row for row in self._rows(query_owner, key_owner) if row]
        return _joined(_squares(rows))

    def _repeated(self, query_owner: int, key_owner: int) -> Sequence[_Cell]:
        assert self._of_one_document is not None
        tiles, first = self._of_one_document(query_owner, key_owner), 0
        cells = []
        for length in self.layout.documents or ():
            size = length // (2 * self.ranks)
            for tile in tiles:
                queries, keys = (
                    Interval(first + rows.start // 2 * size, first + rows.stop // 2 * size)
                    for rows in (tile.query_rows, tile.key_rows)
                )
                cells.append(_Cell(queries, keys, tile.band))
            first += 2 * size
        return cells

    def _rows(self, query_owner: int, key_owner: int) -> Iterator[list[_Cell]]:
        """What each piece of queries sees, from the first key to the last; full runs as one."""
        queries, keys = (
            self._pieces[self._begins[rank] : self._begins[rank + 1]]
            for rank in (query_owner, key_owner)
        )
        table = self.mask.overview(queries.bounds, keys.bounds, self.tokens)
        for number, row in enumerate(table):
            yield [cell for cell in self._cells(queries, number, keys, row) if cell]

    def _cells(
        self, queries: Pieces, number: int, keys: Pieces, row: NDArray[np.int8]
    ) -> Iterator[_Cell | None]:
        borders = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for start, stop in pairwise(borders):
            if row[start] == FULLY:
                every = Interval(keys.rows(start).start, keys.rows(stop - 1).stop)
                yield _Cell(queries.rows(number), every, Band.FULL)
            elif row[start] == PARTLY:
                yield from (self._cell(queries, number, keys, k) for k in range(start, stop))

    def _cell(self, queries: Pieces, q: int, keys: Pieces, k: int) -> _Cell | None:
        found = self.mask.band(queries.positions(q), keys.positions(k))
        if found is None:
            return None
        query_rows, key_rows, band = found
        return _Cell(
            query_rows.shifted(queries.rows(q).start), key_rows.shifted(keys.rows(k).start), band
        )


def own_tiles_by_step(
    own: Sequence[Tile], end: int, *, two_levels: bool, chained: bool = False
) -> dict[int, Sequence[Tile]]:
    """Spread a rank's own tiles over the first step and those from `end` on, under last results.

    With two levels of links there is a last message between nodes and one within the node, in a
    chain the other way round: the half goes to the one between, a quarter to the other and to the
    start, whose message is within.
    """
    half, first, second = half_and_quarters(own)
    if not two_levels:
        return {0: half, end: first + second}
    if chained:
        return {0: first, end: half, end + 1: second}
    return {0: first, end: second, end + 1: half}


def half_and_quarters(tiles: Sequence[Tile]) -> tuple[list[Tile], list[Tile], list[Tile]]:
    """Share tiles out into a half and two quarters of their pairs.

    Several go in their order, so that the rows of a part follow each other, and only what lies
    across a border is cut; if it is small, it stays whole on the side that has more of it. A tile
    of fewer than four rows, alone, is missing in some parts.
    """
    if len(tiles) == 1:
        return _in_three(*tiles)
    parts: tuple[list[Tile], list[Tile], list[Tile]] = ([], [], [])
    total = sum(tile.pairs for tile in tiles)
    borders, number, before = (total // 2, total * 3 // 4), 0, 0
    for tile in tiles:
        row = 0
        while number < 2 and before + tile.pairs > borders[number]:
            start, row = row, _border_row(tile, borders[number] - before, total)
            parts[number].extend(_rows_of(tile, start, row))
            number += 1
        parts[number].extend(_rows_of(tile, row, tile.query_rows.length))
        before += tile.pairs
    return parts


def _in_three(tile: Tile) -> tuple[list[Tile], list[Tile], list[Tile]]:
    """Cut one tile into a half and two quarters.

    A causal square falls into the full square below the diagonal and the two causal ones on it; any
    other tile into rows.
    """
    rows, every = tile.query_rows.length, Interval(0, tile.key_rows.length)
    middle = rows // 2
    low, high = Interval(0, middle), Interval(middle, rows)
    if _is_square(tile):
        pieces = (high, low), (low, low), (high, high)
    else:
        cut = middle + (rows - middle) // 2
        pieces = (low, every), (Interval(middle, cut), every), (Interval(cut, rows), every)
    half, first, second = ([*tile_part(tile, *piece)] for piece in pieces)
    return half, first, second


def _border_row(tile: Tile, pairs: int, total: int) -> int:
    """Return the row of a tile before which are so many of its pairs, as exactly as it pays."""
    rows = tile.query_rows.length
    if tile.pairs * _SMALL < total:
        return rows if 2 * pairs >= tile.pairs else 0

    def before(row: int) -> int:
        return sum(part.pairs for part in _rows_of(tile, 0, row))

    return bisect_left(range(rows), pairs, key=before)


def _rows_of(tile: Tile, start: int, stop: int) -> tuple[Tile, ...]:
    """Return these rows of a tile; of a causal square what is full, and a causal square."""
    queries, every = Interval(start, stop), Interval(0, tile.key_rows.length)
    if not _is_square(tile):
        return tile_part(tile, queries, every)
    return (*tile_part(tile, queries, Interval(0, start)), *tile_part(tile, queries, queries))


def _is_square(tile: Tile) -> bool:
    return tile.band == Band.CAUSAL and tile.query_rows.length == tile.key_rows.length


def tile_part(tile: Tile, queries: Interval, keys: Interval) -> tuple[Tile, ...]:
    """Return what is left of a tile for some of its rows, counted in the tile; () if nothing is."""
    found = tile.band.cut(queries, keys)
    if found is None:
        return ()
    queries, keys, band = found
    query_rows = queries.shifted(tile.query_rows.start)
    key_rows = keys.shifted(tile.key_rows.start)
    return (replace(tile, query_rows=query_rows, key_rows=key_rows, band=band),)


def _squares(rows: Iterable[Sequence[_Cell]]) -> list[Sequence[_Cell]]:
    """Join rows that make up a causal square, as those of a document do on one rank."""
    joined: list[Sequence[_Cell]] = []
    for row in rows:
        *before, last = row
        above = joined[-1] if joined else ()
        if len(above) == 1 and _are_squares(above[0], last):
            queries, (start, stop) = last.queries, above[0].queries
            if queries.start == stop and before == [_Cell(queries, above[0].keys, Band.FULL)]:
                every = Interval(start, queries.stop)
                joined[-1] = [_Cell(every, every, Band.CAUSAL)]
                continue
        joined.append(row)
    return joined


def _are_squares(*cells: _Cell) -> bool:
    return all(cell.queries == cell.keys and cell.band == Band.CAUSAL for cell in cells)


def _joined(rows: Sequence[Sequence[_Cell]]) -> list[_Cell]:
    """Join the full cells of neighbouring queries that see the same keys."""
    joined: list[Sequence[_Cell]] = []
    for row in rows:
        if joined and _see_the_same(joined[-1], row):
            start = joined.pop()[0].queries.start
            row = [c._replace(queries=Interval(start, c.queries.stop)) for c in row]
        joined.append(row)
    return [cell for row in joined for cell in row]


def _see_the_same(above: Sequence[_Cell], below: Sequence[_Cell]) -> bool:
    return (
        above[0].queries.stop == below[0].queries.start
        and all(cell.band == Band.FULL for cell in (*above, *below))
        and [cell.keys for cell in above] == [cell.keys for cell in below]
    )
