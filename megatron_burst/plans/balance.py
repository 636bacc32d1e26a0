"""A layout made for the documents of a batch: equal tokens, equal work; and whether it pays."""

from collections.abc import Hashable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from megatron_burst.config import BurstConfig
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.dealing import WAYS, deal
from megatron_burst.plans.document_work import DocumentWork
from megatron_burst.plans.layout import Layout, zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import choose
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import choose_grid

BOUND = 1.05
"""How much more than the mean a rank may compute."""

_SMALL = 2**15  # documents times ranks: as long as several layouts are made and counted


class Balanced(NamedTuple):
    """A layout for the documents of a batch."""

    layout: Layout
    chunk: int
    """How many tokens follow each other on a rank, the mean."""
    imbalance: float
    """Max / mean over the ranks of their pairs, by queries or by keys; 1.0 is perfect."""


def balanced(mask: Mask, tokens: int, nodes: Sequence[Hashable]) -> Balanced:
    """Return a layout with equal tokens and nearly equal work for the ranks on these nodes.

    Zigzag, where that is within `BOUND` or no worse; else of several that are within it the one
    that puts the fewest bytes on the bottleneck link. The same on every rank: integers decide.

    Raises:
        ValueError: the tokens do not divide as zigzag needs it, or the mask has a block table.
    """
    usual = zigzag(tokens, len(nodes))
    least, best = imbalance(usual, mask), usual
    if least > BOUND:
        found = [(least, usual), *_dealt(mask, tokens, nodes)]
        even = [each for each in found if each[0] <= BOUND] or [min(found, key=itemgetter(0))]
        if len(even) > 1:
            even.sort(key=lambda each: _bytes(each[1], mask, nodes))
        least, best = even[0]
    return Balanced(best, tokens // sum(map(len, best.shards)), least)


def _dealt(mask: Mask, tokens: int, nodes: Sequence[Hashable]) -> Iterator[tuple[float, Layout]]:
    """Deal in every way; where that would take long, until one is within `BOUND`."""
    work = DocumentWork.of(mask, tokens)
    for way in WAYS:
        layout = deal(work, nodes, way)
        yield (found := imbalance(layout, mask)), layout
        if found <= BOUND and len(work.lengths) * len(nodes) > _SMALL:
            return


def _bytes(layout: Layout, mask: Mask, nodes: Sequence[Hashable]) -> int:
    """Return what a layer puts on the bottleneck link, of heads as many models have them."""
    shape, config = Shape(layout.local_tokens, 4, 1, 128, 128, 2, 4), BurstConfig()
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    choice = choose(config, Tiling(layout, mask), grid, shape, nodes)
    return sum(offers[0].cost.bottleneck for offers in (choice.forward, choice.backward))


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
