"""Joins cells that lie side by side: few large kernel calls run faster than many small ones."""

from typing import NamedTuple

import numpy as np

from megatron_burst.plans.visibility.band import Bools, Ints
from megatron_burst.plans.visibility.cells import Cells


def fewest(of: Ints, piece: Ints, cells: Cells) -> tuple[Cells, Ints]:
    """Return the fewest cells that cover the same as these, and what each is of.

    Args:
        of: a number for the pair of ranks of each; only cells of one pair are joined.
        piece: a number for the rows of queries of each that see alike; it grows with the rows.
        cells: with rows of pieces that see keys in part cut.
    """
    order = np.lexsort((cells.rows[:, 2], piece, of))
    given = _Given(of[order], piece[order], cells.select(order))
    joined = _join_queries(_join_squares(_join_keys(given))) if len(cells) else given
    return joined.cells, joined.of


class _Given(NamedTuple):
    """Cells in order: by what they are of, then by pieces of queries, then by keys."""

    of: Ints
    piece: Ints
    cells: Cells

    @property
    def first(self) -> Ints:
        """The first cell of each piece, of those that see anything."""
        changes = (np.diff(self.of) != 0) | (np.diff(self.piece) != 0)
        return np.flatnonzero(np.append(True, changes))


def _join_keys(given: _Given) -> _Given:
    """Join neighbouring keys that the same queries see whole."""
    rows, are_full = given.cells.rows, given.cells.are_full
    goes_on = (rows[1:, :2] == rows[:-1, :2]).all(axis=1) & (rows[1:, 2] == rows[:-1, 3])
    goes_on &= are_full[1:] & are_full[:-1]
    return _join(given, np.arange(len(rows)), goes_on, rows[:, 3], [3])


def _join_squares(given: _Given) -> _Given:
    """Join pieces that make up a causal square, as those of a document do on one rank."""
    first, rows = given.first, given.cells.rows
    last, size = _lasts(first, len(rows)), _sizes(first, len(rows))
    is_square = given.cells.are_squares[last] & (rows[last, :2] == rows[last, 2:]).all(axis=1)
    alone = is_square & (size == 1)
    below = is_square & (size == 2) & given.cells.are_full[first]  # it sees all before it, too
    below &= (rows[first, :2] == rows[last, :2]).all(axis=1) & (rows[first, 3] == rows[last, 0])
    begins, stops = rows[first, 2], rows[last, 1]
    goes_on = below[1:] & (alone | below)[:-1]
    goes_on &= (begins[1:] == begins[:-1]) & (rows[last[1:], 0] == stops[:-1])
    goes_on &= np.diff(given.of[first]) == 0
    heads = np.maximum.accumulate(np.where(np.append(False, goes_on), 0, np.arange(len(first))))
    return _join(given, first, goes_on & alone[heads[1:]], stops, [1, 3])


def _join_queries(given: _Given) -> _Given:
    """Join neighbouring pieces of queries that see the same keys, all of them."""
    first, rows = given.first, given.cells.rows
    size = _sizes(first, len(rows))
    piece = np.repeat(np.arange(len(first)), size)
    is_whole = given.cells.are_full & (rows[:, :2] == rows[first[piece], :2]).all(axis=1)
    is_whole = np.logical_and.reduceat(is_whole, first)
    above = np.maximum(np.arange(len(rows)) - size[piece], 0)  # where sizes are equal
    same_keys = np.logical_and.reduceat((rows[:, 2:] == rows[above, 2:]).all(axis=1), first)
    goes_on = is_whole[1:] & is_whole[:-1] & same_keys[1:] & (size[1:] == size[:-1])
    goes_on &= rows[first[1:], 0] == rows[first[:-1], 1]
    return _join(given, first, goes_on, rows[first, 1], [1])


def _join(given: _Given, first: Ints, goes_on: Bools, stops: Ints, columns: list[int]) -> _Given:
    """Join groups of cells, which begin at `first`, with the one before, from the second one on.

    What is joined has the cells of its first group, with the `stops` of its last one in `columns`.
    """
    size = _sizes(first, len(given.of))
    is_new = np.append(True, ~goes_on | (np.diff(given.of[first]) != 0))
    heads = np.flatnonzero(is_new)
    last = _lasts(heads, len(first))
    kept = np.repeat(is_new, size)
    cells = given.cells.select(kept)
    stop = np.repeat(np.where(last > heads, stops[last], 0), size[heads])
    cells.rows[:, columns] = np.maximum(cells.rows[:, columns], stop[:, None])
    return _Given(given.of[kept], given.piece[kept], cells)


def _lasts(first: Ints, count: int) -> Ints:
    return np.append(first[1:], count) - 1


def _sizes(first: Ints, count: int) -> Ints:
    return np.diff(np.append(first, count))
