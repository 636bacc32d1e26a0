"""How much every rank computes in every step, counted for all of them at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.plan import Tiles
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.cells import Cells


class Work(NamedTuple):
    """Sums over the tiles of a rank's step: arrays [step, rank]."""

    pairs: NDArray[np.int64]  # of tokens that see each other
    query_rows: NDArray[np.int64]
    key_rows: NDArray[np.int64]
    visitors: NDArray[np.int64]  # blocks of queries that come, another rank's

    @classmethod
    def of(cls, tiles: Sequence[Mapping[int, Sequence[Tiles]]]) -> "Work":
        """Count tiles, by rank and step."""
        steps = 1 + max(step for rank in tiles for step in rank)
        found = np.zeros((steps, len(tiles), 4), np.int64)
        for rank, by_step in enumerate(tiles):
            for step, some in by_step.items():
                found[step, rank, :3] = _sums(some)
            for step, come in _arrivals(rank, by_step):
                found[step, rank, 3] = come
        return cls(*np.moveaxis(found, -1, 0))

    def all_at(self, step: int) -> "Work":
        """Return the same computed in one step."""
        found = np.zeros((4, step + 1, self.pairs.shape[1]), np.int64)
        found[:, step] = [column.sum(axis=0) for column in self]
        return Work(*found)


def work_of_pairs(
    tiling: Tiling,
    queries: NDArray[np.int64],
    keys: NDArray[np.int64],
    spread: Callable[[Tiles], Mapping[int, Sequence[Tiles]]] | None,
) -> Work:
    """Count once a kind of pairs of ranks.

    Args:
        tiling: has the tiles.
        queries: whose they are, [step, rank].
        keys: the same.
        spread: cuts a rank's own tiles, of step 0, and spreads them over the steps.
    """
    seen = tiling.visible
    each = seen.sums(_of_cells(seen.cells))
    found = np.zeros((len(queries) + 2, queries.shape[1], 4), np.int64)
    found[: len(queries), :, :3] = each[seen.kinds[queries, keys]]
    found[: len(queries), :, 3] = _come(queries, found[: len(queries), :, 0] > 0)
    if spread:
        own, ranks = np.unique(seen.kinds.diagonal(), return_index=True)
        for kind, rank in zip(own, ranks.tolist(), strict=True):
            for step, some in spread(tiling(rank, rank)).items():
                found[step, seen.kinds.diagonal() == kind, :3] = _sums(some)
    return Work(*np.moveaxis(found, -1, 0))


def _arrivals(rank: int, tiles: Mapping[int, Sequence[Tiles]]) -> Iterator[tuple[int, int]]:
    """Count by step the blocks of others' queries that were not those of the tiles before."""
    last = rank
    for step in sorted(tiles):
        every = dict.fromkeys(block.query_owner for block in tiles[step] if len(block))
        owners = [owner for owner in every if owner != rank]
        yield step, sum(before != owner for before, owner in pairwise([last, *owners]))
        last = owners[-1] if owners else last


def _come(queries: NDArray[np.int64], seen: NDArray[np.bool]) -> NDArray[np.bool]:
    """Say where a block of another rank's queries is not the last one that had tiles."""
    ranks = np.arange(queries.shape[1])
    visits = seen & (queries != ranks)
    last = np.maximum.accumulate(np.where(visits, np.arange(len(queries))[:, None], -1))
    last = np.roll(last, 1, axis=0)
    last[0] = -1
    return visits & ((last < 0) | (queries[last, ranks] != queries))


def _of_cells(cells: Cells) -> NDArray[np.int64]:
    """Return the pairs, the rows of queries and the rows of keys of each: [cell, 3]."""
    return np.column_stack([cells.pairs, cells.sizes])


def _sums(blocks: Iterable[Tiles]) -> NDArray[np.int64]:
    return sum((_of_cells(block.cells).sum(axis=0) for block in blocks), np.zeros(3, np.int64))
