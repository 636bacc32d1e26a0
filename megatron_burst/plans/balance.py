"""A layout made for the documents of a batch: equal tokens, equal work; and whether it pays."""

from collections.abc import Hashable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.dealing import DocumentWork, deal
from megatron_burst.plans.layout import Layout, zigzag
from megatron_burst.plans.mask import Mask

BOUND = 1.05
"""How much more than the mean a rank may compute."""


class Balanced(NamedTuple):
    """A layout for the documents of a batch."""

    layout: Layout
    chunk: int
    """How many tokens follow each other on a rank, the mean."""
    imbalance: float
    """Max / mean over the ranks of their pairs, by queries or by keys; 1.0 is perfect."""


def balanced(mask: Mask, tokens: int, nodes: Sequence[Hashable]) -> Balanced:
    """Return a layout with equal tokens and nearly equal work for the ranks on these nodes.

    Zigzag, where that is within `BOUND` or no worse. The same on every rank: integers decide.

    Raises:
        ValueError: the tokens do not divide as zigzag needs it, or the mask has a block table.
    """
    best = zigzag(tokens, len(nodes))
    least = imbalance(best, mask)
    for is_exact in (False, True):
        if least > BOUND:
            found = deal(DocumentWork.of(mask, tokens), nodes, is_exact=is_exact)
            least, best = min((least, best), (imbalance(found, mask), found), key=itemgetter(0))
    return Balanced(best, tokens // sum(map(len, best.shards)), least)


def pays(mask: Mask, tokens: int, ranks: int) -> bool:
    """Whether there are documents, and zigzag leaves a rank with more than `BOUND` of the mean."""
    return mask.documents is not None and imbalance(zigzag(tokens, ranks), mask) > BOUND


def imbalance(layout: Layout, mask: Mask) -> float:
    """Return max / mean of the ranks' pairs, of their queries' or their keys', the larger.

    `Tiling.needs.pairs` has the same sums, of rows and of columns; this needs no tiles. The layout
    is of ranges without gaps, the mask without a block table.
    """
    work = DocumentWork.of(mask, layout.tokens)
    ends = np.array([(r.start, r.stop) for shard in layout.shards for r in shard]).T
    begins = np.cumsum([0, *map(len, layout.shards[:-1])])
    sums = [np.add.reduceat(before[1] - before[0], begins) for before in work.before(ends)]
    return float(max(of_ranks.max() for of_ranks in sums) * layout.ranks / work.pairs.sum())
