"""How many pairs the tokens of documents have, as queries and as keys."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.mask import Mask


@dataclass(frozen=True, slots=True)
class DocumentWork:
    """How many pairs the queries, or the keys, of positions have."""

    starts: Ints  # of documents
    lengths: Ints
    window: int
    is_causal: bool

    @classmethod
    def of(cls, mask: Mask, tokens: int) -> "DocumentWork":
        """Return those of a mask; one document, where it has none.

        Raises:
            ValueError: it has a block table, or documents with padding.
        """
        mask.check_length(tokens)
        if mask.block_table is not None or mask.padding:
            raise ValueError("a layout is balanced for documents, not for a block mask or padding")
        borders = np.array(mask.documents or (0, tokens))
        window = tokens if mask.window is None else mask.window
        return cls(borders[:-1], np.diff(borders), window, mask.is_causal)

    @property
    def pairs(self) -> Ints:
        """Those of each document."""
        return self._of_first(self.lengths, self.lengths)

    def before(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the pairs of all queries before each position, and those of all keys."""
        document = np.searchsorted(self.starts, positions, "right") - 1
        length, first = self.lengths[document], positions - self.starts[document]
        every = self.pairs
        done, whole = (np.cumsum(every) - every)[document], every[document]
        behind = self._of_first(length - first, length)  # keys are queries read backwards
        return done + self._of_first(first, length), done + whole - behind

    def _of_first(self, count: Ints, length: Ints) -> Ints:
        """The pairs of so many first queries of documents of these lengths."""
        growing = np.minimum(count, self.window + 1)  # as long as the window hides nothing
        behind = growing * (growing + 1) // 2 + (count - growing) * (self.window + 1)
        return behind if self.is_causal else behind + count * length - count * (count + 1) // 2


class DocumentItems(NamedTuple):
    """What is dealt: documents, and short ones that follow each other as one; arrays."""

    start: Ints
    length: Ints
    rate: Ints  # twice the pairs of a token, the mean
    reach: Ints  # how far queries see; 0 where all see as much, wherever they are

    @classmethod
    def of(cls, work: DocumentWork, short: int) -> "DocumentItems":
        """Neighbours shorter than `short` are one if they begin in the same `short` tokens."""
        is_short, place = work.lengths < short, work.starts // max(short, 1)
        again = is_short[1:] & is_short[:-1] & (place[1:] == place[:-1])
        first = (np.concatenate([[True], ~again])).nonzero()[0]
        length = np.add.reduceat(work.lengths, first)
        rate = 2 * np.add.reduceat(work.pairs, first) // length
        reach = np.minimum(np.maximum.reduceat(work.lengths, first), work.window)
        return cls(work.starts[first], length, rate, reach if work.is_causal else 0 * reach)
