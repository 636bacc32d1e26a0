"""What a tile's mask looks like: a band around a diagonal. No torch."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.visibility.interval import Interval

type Ints = NDArray[np.int64]
type Bools = NDArray[np.bool]

FAR = 2**40  # rows; a side of a band that hides nothing, in arrays


@dataclass(frozen=True, slots=True)
class Band:
    """What a tile's mask looks like to a kernel: query i sees the keys i - left … i + right.

    None is no limit on that side.
    """

    left: int | None
    right: int | None

    FULL: ClassVar["Band"]  # every query sees every key
    CAUSAL: ClassVar["Band"]  # of a square tile: query i sees keys 0 … i

    @classmethod
    def of_sides(cls, left: int, right: int) -> "Band":
        """Return the band of these `sides`."""
        return cls(*(None if side == FAR else side for side in (left, right)))

    @property
    def sides(self) -> tuple[int, int]:
        """How far it reaches to the left and to the right; `FAR` for None."""
        left, right = (FAR if side is None else side for side in (self.left, self.right))
        return left, right

    def is_banded(self, queries: int, keys: int) -> bool:
        """Whether a tile of this size is neither full nor a causal square."""
        return self != Band.FULL and (self != Band.CAUSAL or queries != keys)

    def reaches_all(self, queries: int, keys: int) -> bool:
        """Whether every query of a tile of this size sees a key, as those of all our tiles do."""
        left, right = self.sides
        return keys > 0 and right >= 0 and queries - 1 - left < keys and left + right >= 0

    def window(self, queries: int, keys: int) -> tuple[int | None, int | None]:
        """Return (left, right) counted from the diagonal that ends in the tile's last corner.

        So FlashAttention counts. Query i sees i + keys - queries - left … i + keys - queries +
        right; neither is negative.
        """
        shift = keys - queries
        left = None if self.left is None else self.left + shift
        return left, None if self.right is None else self.right - shift

    def of_corner(self, queries: int, keys: int) -> "Band":
        """Return the band of a tile of this size that has the window of a square under this band.

        The inverse of `window` for the tiles that `cut` leaves.
        """
        left, right, wider = *self.sides, keys - queries
        left = FAR if left - wider >= queries - 1 else left - wider
        band = Band.of_sides(left, FAR if right + wider >= keys - 1 else right + wider)
        assert band.reaches_all(queries, keys), "rows that see nothing"
        return band

    def visible(self, queries: int, keys: int) -> Bools:
        """Write the tile's mask out: [queries, keys]."""
        distance = np.arange(keys) - np.arange(queries)[:, None]
        left, right = self.sides
        return (distance <= right) & (distance >= -left)

    def pairs(self, queries: int, keys: int) -> int:
        """Return how many (query, key) pairs of a tile of this size are visible.

        Every query sees a key; of the keys the last may be seen by none.
        """
        left, right = self.sides
        after = keys - 1 - right  # the first query does not see so many of the last keys
        hidden = _triangle(after) - _triangle(after - queries) + _triangle(queries - 1 - left)
        return queries * keys - hidden

    def cut(self, queries: Interval, keys: Interval) -> "tuple[Interval, Interval, Band] | None":
        """Return the least tile that holds all pairs of these rows; None if they see nothing.

        The rows are counted in this band's own tile, and may reach beyond it.
        """
        given = np.array([[*queries, *keys]])
        is_seen, rows, sides = least_tiles(given, np.array([self.sides]))
        if not is_seen[0]:
            return None
        ends = rows[0].tolist()
        return Interval(*ends[:2]), Interval(*ends[2:]), Band.of_sides(*sides[0].tolist())


Band.FULL = Band(None, None)
Band.CAUSAL = Band(None, 0)


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


def visible_pairs(sizes: Ints, sides: Ints) -> Ints:
    """Return how many (query, key) pairs of tiles are visible, of their sizes and sides: [.., 2].

    Every query sees a key and every key is seen, as `least_tiles` leaves them: what is hidden is a
    triangle at either corner.
    """
    hidden = np.maximum(0, sizes - 1 - sides)
    return np.asarray(sizes.prod(axis=-1) - (hidden * (hidden + 1) // 2).sum(axis=-1))


def least_tiles(rows: Ints, sides: Ints) -> tuple[Bools, Ints, Ints]:
    """Return of each part of a band the least tile that holds all its pairs, and that tile's sides.

    Before it whether there is any. In that tile every query sees a key and every key is seen.

    Args:
        rows: of the parts, [part, 4]: the first query, what follows the last, and the same of keys,
            counted in the band's own tile; they may reach beyond it.
        sides: how far each part's band reaches to the left and right, [part, 2]; FAR for no limit.
    """
    (start, stop, key_start, key_stop), (left, right) = rows.T, sides.T
    start = np.maximum(start, key_start - right)  # the first query that sees the first key
    key_stop = np.minimum(key_stop, stop + right)
    key_start = np.maximum(key_start, start - left)
    stop = np.minimum(stop, key_stop + left)
    is_seen = (left + right >= 0) & (start < stop) & (key_start < key_stop)
    shift = key_start - start
    left, right = left + shift, right - shift
    left = np.where(left >= stop - start - 1, FAR, left)
    right = np.where(right >= key_stop - key_start - 1, FAR, right)
    tiles = np.stack([start, stop, key_start, key_stop], axis=1)
    return is_seen, tiles, np.stack([left, right], axis=1)
