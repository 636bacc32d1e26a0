"""How much every rank computes in every step, counted for all of them at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.plan import Tiles
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.band import Bools, Ints

_MANY = 16  # kinds of own tiles, above which all are taken to be cut as the heaviest one is


class Work(NamedTuple):
    """Sums over the tiles of a rank's step: arrays [step, rank]."""

    pairs: Ints  # of tokens that see each other
    query_rows: Ints
    key_rows: Ints
    visitors: Ints  # blocks of queries that come, another rank's

    def all_at(self, step: int) -> "Work":
        """Return the same computed in one step."""
        counts = np.zeros((4, step + 1, self.pairs.shape[1]), np.int64)
        counts[:, step] = [column.sum(axis=0) for column in self]
        return Work(*counts)


def work_of_pairs(
    tiling: Tiling,
    queries: Ints,
    keys: Ints,
    spread: Callable[[Tiles], Mapping[int, Sequence[Tiles]]] | None,
) -> Work:
    """Count once a kind of pairs of ranks, whose queries meet whose keys: both [step, rank].

    `spread` cuts a rank's own tiles, of step 0, and spreads them over the steps.
    """
    each = tiling.work
    counts = np.zeros((len(queries) + 2, queries.shape[1], 4), np.int64)
    counts[: len(queries), :, :3] = each[queries, keys]
    counts[: len(queries), :, 3] = _come(queries, counts[: len(queries), :, 0] > 0)
    if spread:
        every = np.arange(tiling.ranks)
        _, ranks, of_own = np.unique(
            tiling.visible.kinds(every, every), axis=1, return_index=True, return_inverse=True
        )
        if len(ranks) > _MANY:  # under documents every rank's, each of which takes a while to cut
            heaviest = int(each[every, every, 0].argmax())
            shares = _shares(spread(tiling(heaviest, heaviest)))
            for step, share in shares.items():
                counts[step, :, :3] = np.rint(share * each[every, every])
            return Work(*np.moveaxis(counts, -1, 0))
        for kind, rank in enumerate(ranks.tolist()):
            for step, tiles in spread(tiling(rank, rank)).items():
                counts[step, of_own.ravel() == kind, :3] = _sums(tiles)
    return Work(*np.moveaxis(counts, -1, 0))


def _shares(parts: Mapping[int, Sequence[Tiles]]) -> dict[int, NDArray[np.float64]]:
    """Return what share of all pairs, of rows of queries and of keys each step has."""
    sums = {step: _sums(tiles) for step, tiles in parts.items()}
    return {step: own / np.maximum(1, sum(sums.values())) for step, own in sums.items()}


def _come(queries: Ints, seen: Bools) -> Bools:
    """Say where a block of another rank's queries is not the last one that had tiles."""
    ranks = np.arange(queries.shape[1])
    visits = seen & (queries != ranks)
    last = np.maximum.accumulate(np.where(visits, np.arange(len(queries))[:, None], -1))
    last = np.roll(last, 1, axis=0)
    last[0] = -1
    return visits & ((last < 0) | (queries[last, ranks] != queries))


def _sums(blocks: Iterable[Tiles]) -> Ints:
    return sum((block.cells.work.sum(axis=0) for block in blocks), np.zeros(3, np.int64))
