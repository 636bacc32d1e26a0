"""Which keys a query sees, as the relation of two intervals of positions."""

from dataclasses import dataclass
from enum import Enum

from megatron_burst.layout import Interval


class Relation(Enum):
    """What a tile's mask looks like to a kernel."""

    EMPTY = "empty"  # no query sees any key: the tile is not computed
    FULL = "full"  # every query sees every key
    CAUSAL = "causal"  # a square tile; query i sees keys 0..i


@dataclass(frozen=True, slots=True)
class Mask:
    """The attention mask of a whole sequence, never built as a matrix."""

    is_causal: bool

    @classmethod
    def causal(cls) -> "Mask":
        """Let position i see the positions up to and including i."""
        return cls(is_causal=True)

    @classmethod
    def full(cls) -> "Mask":
        """Let every position see every position."""
        return cls(is_causal=False)

    def relation(self, query: Interval, key: Interval) -> Relation:
        """Return the relation of the tile that pairs these two intervals of positions.

        Raises:
            ValueError: the intervals overlap without being equal, which no layout produces.
        """
        if not self.is_causal or key.stop <= query.start + 1:
            return Relation.FULL
        if query.stop <= key.start:
            return Relation.EMPTY
        if query == key:
            return Relation.CAUSAL
        raise ValueError(f"intervals {query} and {key} overlap without being equal")

    def pairs(self, tokens: int) -> int:
        """Return how many (query, key) pairs are visible in a sequence of `tokens`."""
        return tokens * (tokens + 1) // 2 if self.is_causal else tokens * tokens
