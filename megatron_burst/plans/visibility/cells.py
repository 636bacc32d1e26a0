"""What queries see of keys, many tiles at once: arrays of rows and bands."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.visibility.band import FAR, Band, Bools, Ints, visible_pairs
from megatron_burst.plans.visibility.interval import Interval


class Cell(NamedTuple):
    """What some queries see of some keys, whosever they are."""

    queries: Interval
    keys: Interval
    band: Band


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Cells in arrays: documents make many, and between many pairs of ranks the same."""

    rows: Ints
    """[cell, 4]: the first of its queries, what follows the last, and the same of its keys."""
    sides: Ints
    """[cell, 2]: how far its band reaches to the left and right; `FAR` for None."""

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> "Cells":
        """Return arrays of these."""
        each = [(*queries, *keys, *band.sides) for queries, keys, band in cells]
        table = np.array(each, np.int64).reshape(-1, 6)
        return cls(table[:, :4], table[:, 4:])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Cell]:
        return map(_cell, self.rows.tolist(), self.sides.tolist())

    def __getitem__(self, number: int) -> Cell:
        return _cell(self.rows[number].tolist(), self.sides[number].tolist())

    def select(self, which: NDArray[np.integer | np.bool] | slice) -> "Cells":
        """Return some of them."""
        return Cells(self.rows[which], self.sides[which])

    @classmethod
    def concatenate(cls, several: Sequence["Cells"]) -> "Cells":
        """Return those of several as one."""
        each = ([getattr(cells, name) for cells in several] for name in ("rows", "sides"))
        return cls(*map(np.concatenate, each))

    @property
    def queries(self) -> Ints:
        """The rows of the queries of each: [cell, 2]."""
        return self.rows[:, :2]

    @property
    def keys(self) -> Ints:
        """The rows of the keys of each: [cell, 2]."""
        return self.rows[:, 2:]

    @property
    def sizes(self) -> Ints:
        """How many queries and keys: [cell, 2]."""
        return self.rows[:, 1::2] - self.rows[:, ::2]

    @property
    def are_full(self) -> Bools:
        """Whether every query of each sees every key."""
        return (self.sides == FAR).all(axis=1)

    @property
    def are_squares(self) -> Bools:
        """Whether each is a causal square."""
        queries, keys = self.sizes.T
        return (queries == keys) & (self.sides == Band.CAUSAL.sides).all(axis=1)

    @property
    def pairs(self) -> Ints:
        """How many (query, key) pairs of each are visible."""
        return visible_pairs(self.sizes, self.sides)

    @property
    def work(self) -> Ints:
        """The pairs, the rows of queries and the rows of keys of each: [cell, 3]."""
        return np.column_stack([self.pairs, self.sizes])

    @property
    def is_banded(self) -> bool:
        """Whether any is neither full nor a causal square."""
        return not (self.are_full | self.are_squares).all()


def _cell(rows: Sequence[int], sides: Sequence[int]) -> Cell:
    return Cell(Interval(*rows[:2]), Interval(*rows[2:]), Band.of_sides(*sides))
