"""Which tiles make up what one rank's queries see of another rank's keys."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.cells import Cell, Cells
from megatron_burst.plans.kinds import Kinds, kinds_of
from megatron_burst.plans.layout import Interval, Layout, zigzag
from megatron_burst.plans.mask import FULLY, PARTLY, Band, Mask
from megatron_burst.plans.needs import Needs, needs_of, needs_of_kinds
from megatron_burst.plans.pieces import Pieces, cut_pieces
from megatron_burst.plans.plan import Kind, Tile, Tiles, by_blocks

_SMALL = 64  # a tile below this part of the pairs is not cut


class Tiling:
    """The tiles of every pair of ranks under one layout and mask, made when asked for."""

    def __init__(self, layout: Layout, mask: Mask) -> None:
        mask.check_length(layout.tokens)
        self.layout, self.mask = layout, mask
        self.ranks, self.tokens = layout.ranks, layout.tokens
        self.local_tokens = layout.local_tokens
        self._known: dict[int | tuple[int, int], Cells] = {}

    def __call__(self, query_owner: int, key_owner: int) -> Tiles:
        """Return the fewest tiles that cover what one rank's queries see of another's keys.

        Neighbouring rows that see the same share a tile, because few large kernel calls run faster
        than many small ones. Every query of a tile sees at least one of its keys.
        """
        pair = (query_owner, key_owner)
        kind = pair if self.kinds is None else int(self.kinds.numbers[pair])
        if (cells := self._known.get(kind)) is None:
            find = self._found if self._of_one_document is None else self._repeated
            cells = self._known[kind] = find(*pair)
        return Tiles(*pair, cells)

    def of_block(self, kind: Kind, owner: int, user: int) -> Tiles:
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
        cells = [self(*pair).cells for pair in self.kinds.examples]
        return needs_of_kinds(self.kinds, cells, self.mask, self.local_tokens)

    @cached_property
    def all_is_needed(self) -> bool:
        """Whether every rank needs all rows of every other."""
        in_part = any(ends.any() for ends in self.needs.parts.values())
        return bool((self.needs.pairs > 0).all()) and not in_part

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

    def _found(self, query_owner: int, key_owner: int) -> Cells:
        rows = [row for row in self._rows(query_owner, key_owner) if row]
        return Cells.of(_joined(_squares(rows)))

    def _repeated(self, query_owner: int, key_owner: int) -> Cells:
        assert self._of_one_document is not None
        of_one = self._of_one_document(query_owner, key_owner).cells
        chunk = np.array(self.layout.documents)[:, None, None] // (2 * self.ranks)
        first = 2 * (np.cumsum(chunk, axis=0) - chunk)
        rows = first + chunk * of_one.rows // 2  # [document, cell, 4]
        return Cells(rows.reshape(-1, 4), np.tile(of_one.sides, (len(chunk), 1)))

    def _rows(self, query_owner: int, key_owner: int) -> Iterator[list[Cell]]:
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
    ) -> Iterator[Cell | None]:
        borders = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for start, stop in pairwise(borders):
            if row[start] == FULLY:
                every = Interval(keys.rows(start).start, keys.rows(stop - 1).stop)
                yield Cell(queries.rows(number), every, Band.FULL)
            elif row[start] == PARTLY:
                yield from (self._cell(queries, number, keys, k) for k in range(start, stop))

    def _cell(self, queries: Pieces, q: int, keys: Pieces, k: int) -> Cell | None:
        found = self.mask.band(queries.positions(q), keys.positions(k))
        if found is None:
            return None
        query_rows, key_rows, band = found
        return Cell(
            query_rows.shifted(queries.rows(q).start), key_rows.shifted(keys.rows(k).start), band
        )


def together(visits: Sequence[Sequence[Tile]]) -> Sequence[Tile]:
    """Return the tiles of visits that are computed in one step; of one as they are."""
    return visits[0] if len(visits) == 1 else [tile for visit in visits for tile in visit]


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
        return {0: half, end: half.having(Cells.joined([first.cells, second.cells]))}
    if chained:
        return {0: first, end: half, end + 1: second}
    return {0: first, end: second, end + 1: half}


def half_and_quarters(tiles: Sequence[Tile]) -> tuple[Tiles, Tiles, Tiles]:
    """Share the tiles of two blocks out into a half and two quarters of their pairs.

    Several go in their order, so that the rows of a part follow each other, and only what lies
    across a border is cut; if it is small, it stays whole on the side that has more of it. A tile
    of fewer than four rows, alone, is missing in some parts.
    """
    (own,) = by_blocks(tiles)
    cells, total = own.cells, int(own.cells.pairs.sum())
    if not len(cells):
        return own, own, own
    if len(cells) == 1:
        half, first, second = map(Cells.of, _in_three(*cells))
    else:
        ends = [(0, 0), *(_border(cells, n) for n in (total // 2, total * 3 // 4)), (len(cells), 0)]
        half, first, second = (_between(cells, *some) for some in pairwise(ends))
    return own.having(half), own.having(first), own.having(second)


def _in_three(cell: Cell) -> Iterator[list[Cell]]:
    """Cut one into a half and two quarters.

    A causal square falls into the full square below the diagonal and the two causal ones on it; any
    other into rows.
    """
    rows, every = cell.queries.length, Interval(0, cell.keys.length)
    middle = rows // 2
    low, high = Interval(0, middle), Interval(middle, rows)
    if _is_square(cell):
        pieces = (high, low), (low, low), (high, high)
    else:
        cut = middle + (rows - middle) // 2
        pieces = (low, every), (Interval(middle, cut), every), (Interval(cut, rows), every)
    return (_part(cell, *piece) for piece in pieces)


def _border(cells: Cells, pairs: int) -> tuple[int, int]:
    """Return the cell, and the row of it, before which are so many pairs."""
    ends = cells.pairs.cumsum()
    number = int(ends.searchsorted(pairs, "right"))
    cell, before = cells[number], int(ends[number - 1]) if number else 0
    return number, _border_row(cell, pairs - before, int(ends[-1]))


def _border_row(cell: Cell, pairs: int, total: int) -> int:
    """Return the row of a cell before which are so many of its pairs, as exactly as it pays."""
    rows, every = cell.queries.length, cell.band.pairs(cell.queries.length, cell.keys.length)
    if every * _SMALL < total:
        return rows if 2 * pairs >= every else 0

    def before(row: int) -> int:
        return int(Cells.of(_rows_of(cell, 0, row)).pairs.sum())

    return bisect_left(range(rows), pairs, key=before)


def _between(cells: Cells, start: tuple[int, int], stop: tuple[int, int]) -> Cells:
    """Return the cells from one row of one of them to one of another; row 0 cuts nothing."""
    (first, begin), (last, end) = start, stop
    if first == last:
        return Cells.of(_rows_of(cells[first], begin, end))
    head = _rows_of(cells[first], begin, cells[first].queries.length) if begin else []
    tail = _rows_of(cells[last], 0, end) if end else []
    whole = cells.some(slice(first + bool(begin), last))
    return Cells.joined([Cells.of(head), whole, Cells.of(tail)])


def _rows_of(cell: Cell, start: int, stop: int) -> list[Cell]:
    """Return these rows of a cell; of a causal square what is full, and a causal square."""
    queries, every = Interval(start, stop), Interval(0, cell.keys.length)
    if not _is_square(cell):
        return _part(cell, queries, every)
    return _part(cell, queries, Interval(0, start)) + _part(cell, queries, queries)


def _is_square(cell: Cell) -> bool:
    return cell.band == Band.CAUSAL and cell.queries.length == cell.keys.length


def _part(cell: Cell, queries: Interval, keys: Interval) -> list[Cell]:
    """Return what is left of a cell for some of its rows, counted in it; [] if nothing is."""
    found = cell.band.cut(queries, keys)
    if found is None:
        return []
    queries, keys, band = found
    return [Cell(queries.shifted(cell.queries.start), keys.shifted(cell.keys.start), band)]


def _squares(rows: Iterable[Sequence[Cell]]) -> list[Sequence[Cell]]:
    """Join rows that make up a causal square, as those of a document do on one rank."""
    joined: list[Sequence[Cell]] = []
    for row in rows:
        *before, last = row
        above = joined[-1] if joined else ()
        if len(above) == 1 and _are_squares(above[0], last):
            queries, (start, stop) = last.queries, above[0].queries
            if queries.start == stop and before == [Cell(queries, above[0].keys, Band.FULL)]:
                every = Interval(start, queries.stop)
                joined[-1] = [Cell(every, every, Band.CAUSAL)]
                continue
        joined.append(row)
    return joined


def _are_squares(*cells: Cell) -> bool:
    return all(cell.queries == cell.keys and cell.band == Band.CAUSAL for cell in cells)


def _joined(rows: Sequence[Sequence[Cell]]) -> list[Cell]:
    """Join the full cells of neighbouring queries that see the same keys."""
    joined: list[Sequence[Cell]] = []
    for row in rows:
        if joined and _see_the_same(joined[-1], row):
            start = joined.pop()[0].queries.start
            row = [c._replace(queries=Interval(start, c.queries.stop)) for c in row]
        joined.append(row)
    return [cell for row in joined for cell in row]


def _see_the_same(above: Sequence[Cell], below: Sequence[Cell]) -> bool:
    """Return whether all queries of two pieces see all of the same keys."""
    return (
        above[0].queries.stop == below[0].queries.start
        and all(cell.band == Band.FULL for cell in (*above, *below))
        and [cell.keys for cell in above] == [cell.keys for cell in below]
        and all(len({cell.queries for cell in row}) == 1 for row in (above, below))
    )
