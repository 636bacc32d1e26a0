"""Which tiles make up what one rank's queries see of another rank's keys."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from megatron_burst.layout import Interval, Layout
from megatron_burst.mask import Mask, Relation
from megatron_burst.plan import Tile


class _Piece(NamedTuple):
    """A run of one rank's rows that crosses no border of a document or block."""

    positions: range
    rows: Interval


class _Cell(NamedTuple):
    """What a piece of queries sees of a piece of keys, in local rows."""

    queries: Interval
    keys: Interval
    relation: Relation


class Tiling:
    """The tiles of every pair of ranks under one layout and mask, made when asked for.

    Raises:
        ValueError: the mask is one of a sequence of another length.
    """

    def __init__(self, layout: Layout, mask: Mask) -> None:
        mask.check_length(layout.tokens)
        self.layout, self.mask = layout, mask
        self.ranks, self.tokens, self.local_tokens = (
            layout.ranks,
            layout.tokens,
            layout.local_tokens,
        )
        cuts = mask.cuts(layout.tokens)
        self._pieces = [list(_pieces(layout, rank, cuts)) for rank in range(layout.ranks)]
        self._known: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def __call__(self, query_owner: int, key_owner: int) -> tuple[Tile, ...]:
        """Return the fewest tiles that cover what one rank's queries see of another's keys.

        Neighbouring rows that see the same share a tile, because few large kernel calls run faster
        than many small ones. Every query of a tile sees at least one of its keys.
        """
        pair = (query_owner, key_owner)
        if pair not in self._known:
            rows = [row for row in self._rows(*pair) if row]
            whole = _lower_triangle(rows, self.local_tokens)
            cells = [whole] if whole else _joined(rows)
            self._known[pair] = tuple(
                Tile(query_owner, key_owner, cell.queries, cell.keys, cell.relation)
                for cell in cells
            )
        return self._known[pair]

    def all(self) -> Iterator[Tile]:
        """Return the tiles of all pairs of ranks."""
        ranks = range(self.ranks)
        return (tile for pair in product(ranks, ranks) for tile in self(*pair))

    def _rows(self, query_owner: int, key_owner: int) -> Iterator[list[_Cell]]:
        """What each piece of queries sees, piece of keys by piece of keys."""
        by_document = defaultdict(list)
        for piece in self._pieces[key_owner]:
            by_document[self.mask.document(piece.positions.start)].append(piece)
        for queries in self._pieces[query_owner]:
            keys = by_document.get(self.mask.document(queries.positions.start), [])
            yield [cell for key in keys if (cell := self._cell(queries, key))]

    def _cell(self, query: _Piece, key: _Piece) -> _Cell | None:
        found = self.mask.relation(query.positions, key.positions, self.tokens)
        if found is None:
            return None
        queries, keys, relation = found
        return _Cell(_shifted(queries, query.rows.start), _shifted(keys, key.rows.start), relation)


def thirds(tile: Tile) -> tuple[tuple[Tile, ...], tuple[Tile, ...], tuple[Tile, ...]]:
    """Cut a tile into a half and two quarters of its pairs, each a tuple of at most one tile.

    A causal square falls into the full square below the diagonal and the two causal ones on it; any
    other tile into rows. Of fewer than four rows some parts are empty.
    """
    rows, keys = tile.query_rows.length, tile.key_rows.length
    middle = rows // 2
    if tile.relation == Relation.CAUSAL and rows == keys:
        low, high = Interval(0, middle), Interval(middle, rows)
        return tile_part(tile, high, low), tile_part(tile, low, low), tile_part(tile, high, high)
    cut, every = middle + (rows - middle) // 2, Interval(0, keys)
    half, first, second = Interval(0, middle), Interval(middle, cut), Interval(cut, rows)
    return (
        tile_part(tile, half, every),
        tile_part(tile, first, every),
        tile_part(tile, second, every),
    )


def tile_part(tile: Tile, queries: Interval, keys: Interval) -> tuple[Tile, ...]:
    """Return what is left of a tile for some of its rows, counted in the tile; () if nothing is."""
    found = tile.relation.cut(queries, keys)
    if found is None:
        return ()
    queries, keys, relation = found
    queries, keys = (
        _shifted(queries, tile.query_rows.start),
        _shifted(keys, tile.key_rows.start),
    )
    return (replace(tile, query_rows=queries, key_rows=keys, relation=relation),)


def _pieces(layout: Layout, rank: int, cuts: Sequence[int]) -> Iterator[_Piece]:
    for positions, rows in zip(layout.shards[rank], layout.local_rows(rank), strict=True):
        start = 0
        between = cuts[bisect_left(cuts, positions.start + 1) : bisect_left(cuts, positions.stop)]
        for cut in (*between, positions.stop):
            stop = min(len(positions), -((positions.start - cut) // positions.step))
            if stop > start:
                yield _Piece(positions[start:stop], Interval(rows.start + start, rows.start + stop))
            start = max(start, stop)


def _shifted(rows: Interval, by: int) -> Interval:
    return Interval(rows.start + by, rows.stop + by)


def _lower_triangle(rows: Sequence[Sequence[_Cell]], tokens: int) -> _Cell | None:
    """Return one causal square if the cells make it up, as those of a rank's own tile do."""
    everything = Interval(0, tokens)
    square = _Cell(everything, everything, Relation.CAUSAL)
    for number, row in enumerate(rows):
        if [cell.relation for cell in row] != [Relation.FULL] * number + [Relation.CAUSAL]:
            return None
        start = rows[number - 1][-1].queries.stop if number else 0
        if row[-1].queries != row[-1].keys or row[-1].queries.start != start:
            return None
        if any(cell.queries != row[-1].queries for cell in row):
            return None
        if any(cell.keys != rows[i][-1].keys for i, cell in enumerate(row)):
            return None
    return square if rows and rows[-1][-1].queries.stop == tokens else None


def _joined(rows: Sequence[Sequence[_Cell]]) -> list[_Cell]:
    """Join full cells that are neighbours, first along the keys and then along the queries."""
    joined: list[list[_Cell]] = []
    for row in map(_joined_keys, rows):
        if joined and _see_the_same(joined[-1], row):
            start = joined[-1][0].queries.start
            row = [c._replace(queries=Interval(start, c.queries.stop)) for c in row]
            joined.pop()
        joined.append(row)
    return [cell for row in joined for cell in row]


def _joined_keys(row: Sequence[_Cell]) -> list[_Cell]:
    joined: list[_Cell] = []
    for cell in row:
        last = joined[-1] if joined else None
        touch = last and last.keys.stop == cell.keys.start and last.queries == cell.queries
        if last and touch and _are_full((last, cell)):
            cell = cell._replace(keys=Interval(last.keys.start, cell.keys.stop))
            joined.pop()
        joined.append(cell)
    return joined


def _see_the_same(above: Sequence[_Cell], below: Sequence[_Cell]) -> bool:
    return (
        _are_full((*above, *below))
        and [cell.keys for cell in above] == [cell.keys for cell in below]
        and len({cell.queries for cell in above}) == len({cell.queries for cell in below}) == 1
        and above[0].queries.stop == below[0].queries.start
    )


def _are_full(cells: Sequence[_Cell]) -> bool:
    return all(cell.relation == Relation.FULL for cell in cells)
