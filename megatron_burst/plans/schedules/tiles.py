"""Which tiles make up what one rank's queries see of another rank's keys."""

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from megatron_burst.plans.schedules.needs import Needs
from megatron_burst.plans.schedules.plan import Kind, Tiles
from megatron_burst.plans.visibility.band import Band, Ints
from megatron_burst.plans.visibility.cells import Cell, Cells
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.plans.visibility.kinds import Visible
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plans.visibility.visible import visible

_SMALL = 64  # a tile below this part of the pairs is not cut


class Tiling:
    """The tiles of every pair of ranks under one layout and mask, made when asked for."""

    def __init__(self, layout: Layout, mask: Mask) -> None:
        self.layout, self.mask = layout, mask.of_length(layout.tokens)
        self.ranks, self.local_tokens = layout.ranks, layout.local_tokens
        self._known: dict[bytes, Cells] = {}

    def __call__(self, query_owner: int, key_owner: int) -> Tiles:
        """Return the fewest tiles that cover what one rank's queries see of another's keys."""
        kinds = self.visible.kinds(query_owner, key_owner).tobytes()
        if kinds not in self._known:
            self._known[kinds] = self.visible.cells(query_owner, key_owner)
        return Tiles(query_owner, key_owner, self._known[kinds])

    def of_block(self, kind: Kind, owner: int, user: int) -> Tiles:
        """Return what `user` computes with the KV or QUERY block of `owner`."""
        return self(user, owner) if kind is Kind.KV else self(owner, user)

    @cached_property
    def visible(self) -> Visible:
        """What all ranks' queries see of all ranks' keys."""
        return visible(self.layout, self.mask)

    @cached_property
    def work(self) -> Ints:
        """The pairs, rows of queries and rows of keys of tiles: [query owner, key owner, 3]."""
        return self.visible.sums(attrgetter("work"))

    @cached_property
    def needs(self) -> Needs:
        """What the ranks need of each other's rows."""
        return Needs.of(self.visible, self.mask, self.local_tokens)

    @cached_property
    def all_is_needed(self) -> bool:
        """Whether every rank needs all rows of every other."""
        in_part = any(ends.any() for ends in self.needs.parts.values())
        return bool((self.needs.pairs > 0).all()) and not in_part


def own_tiles_by_step(
    own: Tiles, end: int, *, two_levels: bool, chained: bool = False
) -> dict[int, list[Tiles]]:
    """Spread a rank's own tiles over the first step and those from `end` on, under last results.

    With two levels of links there is a last message between nodes and one within the node, in a
    chain the other way round: the half goes to the one between, a quarter to the other and to the
    start, whose message is within.
    """
    half, first, second = half_and_quarters(own)
    if not two_levels:
        return {0: [half], end: [half.having(Cells.concatenate([first.cells, second.cells]))]}
    if chained:
        return {0: [first], end: [half], end + 1: [second]}
    return {0: [first], end: [second], end + 1: [half]}


def half_and_quarters(own: Tiles) -> tuple[Tiles, Tiles, Tiles]:
    """Share the tiles of a query and a key block out into a half and two quarters of their pairs.

    Several go in their order, so that the rows of a part follow each other, and only what lies
    across a border is cut; if it is small, it stays whole on the side that has more of it. A tile
    of fewer than four rows, alone, is missing in some parts.
    """
    cells, total = own.cells, int(own.cells.pairs.sum())
    if not len(cells):
        return own, own, own
    if len(cells) == 1:
        half, first, second = map(Cells.of, _in_three(*cells))
    else:
        ends = [(0, 0), *(_border(cells, n) for n in (total // 2, total * 3 // 4)), (len(cells), 0)]
        half, first, second = (_between(cells, *pair) for pair in pairwise(ends))
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
    rows, keys = cell.queries.length, cell.keys.length
    every = cell.band.pairs(rows, keys)
    if every * _SMALL < total:
        return rows if 2 * pairs >= every else 0
    return bisect_left(range(rows), pairs, key=lambda row: cell.band.pairs(row, keys))


def _between(cells: Cells, start: tuple[int, int], stop: tuple[int, int]) -> Cells:
    """Return the cells from one row of one of them to one of another; row 0 cuts nothing."""
    (first, begin), (last, end) = start, stop
    if first == last:
        return Cells.of(_rows_of(cells[first], begin, end))
    head = _rows_of(cells[first], begin, cells[first].queries.length) if begin else []
    tail = _rows_of(cells[last], 0, end) if end else []
    whole = cells.select(slice(first + bool(begin), last))
    return Cells.concatenate([Cells.of(head), whole, Cells.of(tail)])


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
    cut = cell.band.cut(queries, keys)
    if cut is None:
        return []
    queries, keys, band = cut
    return [Cell(queries.shifted(cell.queries.start), keys.shifted(cell.keys.start), band)]
