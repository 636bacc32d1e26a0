"""Which tokens the context-parallel ranks hold, by the documents of a micro-batch."""

import functools
import logging

from megatron_burst.attention.context import BurstContext
from megatron_burst.config import LayoutName
from megatron_burst.plans.balance.balanced import BOUND, Balanced, balanced, imbalance
from megatron_burst.plans.visibility.layout import Layout, in_order, zigzag
from megatron_burst.plans.visibility.mask import Mask

logger = logging.getLogger(__name__)

_KEPT = 64  # more than the micro-batches that are under way at a time


class Layouts:
    """The layouts of the micro-batches of one context-parallel group.

    The log says what --burst-layout balanced makes of documents, and under zigzag what it would.

    Args:
        context: theirs.
        window: how many keys before it a query sees in all layers; None is no limit, or several.
        queries_a_key: query heads for each kv head.
    """

    def __init__(
        self, context: BurstContext, window: int | None = None, queries_a_key: int = 1
    ) -> None:
        self.context, self._window, self._queries_a_key = context, window, queries_a_key
        config, ranks = context.config, context.ranks
        self._balances = config.layout is LayoutName.BALANCED and ranks > 1
        self._may_pay = config.is_zigzag and config.block_mask is None
        self._may_pay &= context.rank == 0 and context.heads.size < ranks
        self.of = functools.lru_cache(_KEPT)(self._of)
        self.beside = functools.cache(self._beside)

    def _beside(self, context: BurstContext) -> "Layouts":
        """Return those of another group that micro-batches of the same model bring."""
        return Layouts(context, self._window, self._queries_a_key)

    def _of(self, bounds: tuple[int, ...]) -> Layout | None:
        """Return the layout of documents with these bounds; None is that of the configuration."""
        mask = Mask.causal(window=self._window, documents=bounds)
        if self._balances:
            return self._balanced(mask, bounds[-1])
        if self.context.config.layout is LayoutName.CONTIGUOUS:
            return self.context.layout(bounds[-1])
        if self._may_pay and (now := self._imbalance(mask)) > BOUND:
            self._may_pay = False
            then = self._imbalance(mask, self._find(mask, bounds[-1]).layout)
            logger.info(
                "burst attention: zigzag leaves the busiest rank %.2f times the mean of these "
                "documents' work; --burst-layout %s would make it %.2f",
                *(now, LayoutName.BALANCED, then),
            )
        return None

    def _balanced(self, mask: Mask, tokens: int) -> Layout:
        best = self._find(mask, tokens)
        if self.context.should_log((LayoutName.BALANCED, tokens)):
            logger.info(
                "burst attention: %d tokens in documents are balanced over %d ranks in chunks of "
                "%d on the mean: the busiest rank has %.2f times the mean work, under zigzag %.2f",
                *(tokens, self.context.ranks, best.chunk),
                *(self._imbalance(mask, best.layout), self._imbalance(mask)),
            )
        if self.context.config.cuts_for_recompute:  # of a rank the first rows
            return in_order(best.layout)
        return best.layout

    def _find(self, mask: Mask, tokens: int) -> Balanced:
        pairs = zip(self.context.heads.groups, self.context.nodes, strict=True)
        node = {rank: node for group, node in pairs for rank in group}
        nodes = [node[rank] for rank in range(self.context.ranks)]
        return balanced(mask, tokens, nodes, self._queries_a_key)

    def _imbalance(self, mask: Mask, layout: Layout | None = None) -> float:
        """Return max / mean of the pairs of the ranks of a ring; of zigzag without a layout."""
        assert mask.documents is not None
        layout = layout or zigzag(mask.documents[-1], self.context.ranks)
        return imbalance(self.context.heads.ring_layout(layout), mask)
