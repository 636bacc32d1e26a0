"""A layout made for the documents of a batch: equal tokens, equal work."""

from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from megatron_burst.config import BurstConfig, Topology
from megatron_burst.plans.balance.dealing import QUICK_WAYS, WAYS, Way, deal
from megatron_burst.plans.balance.document_work import DocumentWork
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.layout import Layout, zigzag
from megatron_burst.plans.visibility.mask import Mask

BOUND = 1.05
"""How much more than the mean a rank may compute."""

_SMALL = 2**15  # documents times ranks: as long as several layouts are made and counted
_NEAR = 5 / 4  # up to this share of zigzag's bytes another way of dealing may have fewer


class Balanced(NamedTuple):
    """A layout for the documents of a batch, and what decides whether it is taken."""

    imbalance: float
    """Max / mean over the ranks of their pairs, by queries or by keys; 1.0 is perfect."""
    layout: Layout
    sent: int = 0
    """Bytes on the bottleneck link, where these were counted."""

    @property
    def chunk(self) -> int:
        """How many tokens follow each other on a rank, the mean."""
        return self.layout.tokens // sum(map(len, self.layout.shards))

    @property
    def order(self) -> tuple[float, int]:
        """By which the best is chosen."""
        return max(BOUND, self.imbalance), self.sent


def balanced(
    mask: Mask, tokens: int, nodes: Sequence[Hashable], queries_a_key: int = 4
) -> Balanced:
    """Return a layout with equal tokens and nearly equal work for the ranks on these nodes.

    Zigzag, where that is within `BOUND` or no worse; else of several that are within it the one
    that puts the fewest bytes on the bottleneck link. The same on every rank: integers decide.

    Args:
        mask: without a block table or padding.
        tokens: of the sequence.
        nodes: of each rank.
        queries_a_key: query heads for each kv head, on which it depends what is sent.

    Raises:
        ValueError: the tokens do not divide as zigzag needs it, or the mask has a block table
            or padding.
    """
    usual = zigzag(tokens, len(nodes))
    best = Balanced(imbalance(usual, mask), usual)
    if best.imbalance > BOUND:
        best = _dealt(mask, nodes, best, queries_a_key)
    return best


def _dealt(mask: Mask, nodes: Sequence[Hashable], usual: Balanced, queries_a_key: int) -> Balanced:
    """Deal in several ways, and in more where the best puts a few more bytes on the links.

    Where that would take long, in one that is mostly good, and nothing is counted.
    """
    work = DocumentWork.of(mask, usual.layout.tokens)
    is_small = len(work.lengths) * len(nodes) <= _SMALL
    ways, more = WAYS if is_small else QUICK_WAYS

    def sent(layout: Layout) -> int:
        return _bytes(layout, mask, nodes, queries_a_key) if is_small else 0

    def options(ways: Sequence[Way]) -> Iterator[Balanced]:
        for way in ways:
            layout = deal(work, nodes, way)
            uneven = imbalance(layout, mask)
            yield Balanced(uneven, layout, sent(layout) if uneven <= BOUND else 0)

    best, least = min([usual, *options(ways)], key=attrgetter("order")), sent(usual.layout)
    if best.imbalance <= BOUND and not least < best.sent <= _NEAR * least:
        return best
    return min([best, *options(more)], key=attrgetter("order"))


def _bytes(layout: Layout, mask: Mask, nodes: Sequence[Hashable], queries_a_key: int) -> int:
    """Return what a layer puts on the bottleneck link, without a mesh, which carries all blocks."""
    shape = Shape(layout.local_tokens, queries_a_key, 1, 128, 128, 2, 4, sends_raw=True)
    config = BurstConfig(topology=Topology.DOUBLE)
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    choice = choose(config, Tiling(layout, mask), grid, shape, nodes)
    return sum(offers[0].cost.bottleneck for offers in (choice.forward, choice.backward))


def imbalance(layout: Layout, mask: Mask) -> float:
    """Return max / mean of the ranks' pairs, of their queries' or their keys', the larger.

    `Tiling.needs.pairs` has the same sums, of rows and of columns; this needs no tiles. The layout
    is of ranges without gaps, the mask without a block table or padding.
    """
    work = DocumentWork.of(mask, layout.tokens)
    ends = np.array([(r.start, r.stop) for shard in layout.shards for r in shard]).T
    begins = np.cumsum([0, *map(len, layout.shards[:-1])])
    sums = [np.add.reduceat(before[1] - before[0], begins) for before in work.before(ends)]
    return float(max(of_ranks.max() for of_ranks in sums) * layout.ranks / work.pairs.sum())
