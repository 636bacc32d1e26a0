"""Which pairs of ranks have the same tiles: so what concerns all pairs is found once a kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.mask import PARTLY, Mask
from megatron_burst.plans.pieces import Pieces

_CELLS = 2**24  # pairs of pieces, a byte each, that are looked at at once


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of pairs of ranks."""

    numbers: NDArray[np.intp]
    """[query owner, key owner]: those of one number have tiles of the same rows and bands."""
    examples: Sequence[tuple[int, int]]
    """A pair of each kind."""


def kinds_of(pieces: Pieces, mask: Mask, ranks: int, tokens: int) -> Kinds | None:
    """Compare what pieces see of each other, and from how far where they see a part.

    None where the ranks' rows are not cut alike, as by documents, or into too many pieces.
    """
    count = len(pieces.owner) // ranks
    if len(pieces.owner) ** 2 > _CELLS or len(pieces.owner) != ranks * count:
        return None
    if any((x.reshape(ranks, count) != x[:count]).any() for x in (pieces.first, pieces.stop)):
        return None
    table = mask.overview(pieces.bounds, pieces.bounds, tokens)
    query, key = np.nonzero(table == PARTLY)
    far = pieces.starts[query] - pieces.starts[key]
    distances, number = np.unique(far, return_inverse=True)
    base = 3 + len(distances)
    if base**count**2 >= 2**64:
        return None
    cells = table.astype(np.min_scalar_type(base**count**2 - 1))
    cells[query, key] = 3 + number
    codes = np.zeros((ranks, ranks), cells.dtype)
    for row, column in product(range(count), repeat=2):
        codes = codes * base + cells[row::count, column::count]
    _, first, numbers = np.unique(codes, return_index=True, return_inverse=True)
    examples = np.stack(np.divmod(first, ranks), axis=1).tolist()
    return Kinds(numbers.reshape(ranks, ranks), [(query, key) for query, key in examples])
