"""How much every rank computes in every step, counted for all of them at once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.plan import Tile


class Work(NamedTuple):
    """Sums over the tiles of a rank's step: arrays [step, rank]."""

    pairs: NDArray[np.int64]  # of tokens that see each other
    query_rows: NDArray[np.int64]
    key_rows: NDArray[np.int64]
    visitors: NDArray[np.int64]  # blocks of queries that are another rank's

    @classmethod
    def of(cls, tiles: Sequence[Mapping[int, Sequence[Tile]]]) -> "Work":
        """Count tiles, by rank and step."""
        steps = 1 + max(step for rank in tiles for step in rank)
        found = np.zeros((steps, len(tiles), 4), np.int64)
        for rank, by_step in enumerate(tiles):
            for step, some in by_step.items():
                found[step, rank] = *sums(some), len({t.query_owner for t in some} - {rank})
        return cls(*np.moveaxis(found, -1, 0))


def sums(tiles: Iterable[Tile]) -> tuple[int, int, int]:
    """Return the pairs, the rows of queries and the rows of keys of tiles."""
    each = [(t.pairs, t.query_rows.length, t.key_rows.length) for t in tiles]
    pairs, queries, keys = map(sum, zip(*each, strict=True)) if each else (0, 0, 0)
    return pairs, queries, keys
