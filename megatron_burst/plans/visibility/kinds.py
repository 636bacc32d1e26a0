"""What all ranks see of each other: cells in arrays, once for all pairs of ranks that see alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.cells import Cells


@dataclass(frozen=True, slots=True)
class Kinds:
    """The fewest cells that cover what the ranks' queries see of each other's keys.

    Neighbouring rows that see the same share a cell, because few large kernel calls run faster than
    many small ones. Every query of a cell sees at least one of its keys.
    """

    of_pairs: NDArray[np.intp]
    """[query owner, key owner]: pairs of one number have cells of the same rows and bands."""
    cells: Cells
    """Of all kinds, one kind after the other."""
    begins: Ints
    """[kind + 1]: the first cell of each kind."""

    @classmethod
    def of(cls, of_pairs: NDArray[np.intp], cells: Cells, of: Ints) -> "Kinds":
        """Return what `cells` of these kinds are, in order."""
        counts = np.bincount(of, minlength=int(of_pairs.max()) + 1)
        return cls(of_pairs, cells, np.append(0, counts.cumsum()))

    def of_kind(self, number: int) -> Cells:
        """Return the cells of one kind of pairs of ranks."""
        return self.cells.select(slice(*self.begins[number : number + 2].tolist()))

    @property
    def counts(self) -> Ints:
        """How many cells each kind has."""
        return np.diff(self.begins)

    @property
    def of_cells(self) -> Ints:
        """Of which kind each cell is."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def sums(self, values: Ints) -> Ints:
        """Add values of the cells up, [cell, …], by kind."""
        before = np.zeros((1, *values.shape[1:]), np.int64)
        totals = np.concatenate([before, values.cumsum(axis=0)])
        return totals[self.begins[1:]] - totals[self.begins[:-1]]


@dataclass(frozen=True, slots=True)
class Visible:
    """What the ranks' queries see of each other's keys: of several groups of documents apart.

    Two pairs of ranks may be alike in each of two groups and few in both, so that all of them
    together would have a kind for nearly every pair.
    """

    parts: Sequence[Kinds]

    def kinds(self, query_owner: Any, key_owner: Any) -> NDArray[np.intp]:
        """Return of which kind pairs of ranks are in each part: [part, …]."""
        return np.stack([part.of_pairs[query_owner, key_owner] for part in self.parts])

    def cells(self, query_owner: int, key_owner: int) -> Cells:
        """Return what one rank's queries see of another's keys, in the order of their rows."""
        of_pair = self.kinds(query_owner, key_owner).tolist()
        each = [part.of_kind(kind) for part, kind in zip(self.parts, of_pair, strict=True)]
        if len(each) == 1:
            return each[0]
        cells = Cells.concatenate(each)
        return cells.select(np.argsort(cells.rows[:, 0], kind="stable"))

    def for_pairs(self, values: Callable[[Kinds], Ints], joined: np.ufunc = np.add) -> Ints:
        """Return values of kinds, [kind, …], for pairs of ranks, joined over all parts.

        They are [query owner, key owner, …].
        """
        return np.asarray(reduce(joined, (values(p)[p.of_pairs] for p in self.parts)))

    def sums(self, values: Callable[[Cells], Ints]) -> Ints:
        """Add values of cells up, [cell, …], for pairs of ranks: [query owner, key owner, …]."""
        return self.for_pairs(lambda part: part.sums(values(part.cells)))
