"""What queries see of keys, many tiles at once: arrays of rows and bands."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import NamedTuple, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.layout import Interval
from megatron_burst.plans.mask import Band

type Ints = NDArray[np.int64]

FAR = 2**40  # rows; a side of a band that hides nothing


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
        each = [
            (*queries, *keys, *(FAR if side is None else side for side in (band.left, band.right)))
            for queries, keys, band in cells
        ]
        found = np.array(each, np.int64).reshape(-1, 6)
        return cls(found[:, :4], found[:, 4:])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Cell]:
        return map(_cell, self.rows.tolist(), self.sides.tolist())

    def __getitem__(self, number: SupportsIndex) -> Cell:
        number = index(number)  # TypeError for a slice, see `some`
        return _cell(self.rows[number].tolist(), self.sides[number].tolist())

    def some(self, which: NDArray[np.integer | np.bool] | slice) -> "Cells":
        """Return some of them."""
        return Cells(self.rows[which], self.sides[which])

    @classmethod
    def joined(cls, several: Sequence["Cells"]) -> "Cells":
        """Return those of several as one."""
        return cls(
            *(np.concatenate([getattr(x, name) for x in several]) for name in ("rows", "sides"))
        )

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
    def _hidden(self) -> Ints:
        """The sides of the triangles that causality and a window hide: [cell, below and above]."""
        return np.maximum(0, self.sizes - 1 - self.sides)

    @property
    def pairs(self) -> Ints:
        """How many (query, key) pairs of each are visible; see `Band.pairs`."""
        hidden = self._hidden
        return self.sizes.prod(axis=1) - (hidden * (hidden + 1) // 2).sum(axis=1)

    @property
    def is_banded(self) -> bool:
        """Whether any is neither full nor a causal square."""
        below, above = (self._hidden > 0).T
        height, width = self.sizes.T
        is_square = (height == width) & (self.sides[:, 1] == 0) & ~below
        return bool(((below | above) & ~is_square).any())


def _cell(rows: Sequence[int], sides: Sequence[int]) -> Cell:
    left, right = (None if side == FAR else side for side in sides)
    return Cell(Interval(*rows[:2]), Interval(*rows[2:]), Band(left, right))
