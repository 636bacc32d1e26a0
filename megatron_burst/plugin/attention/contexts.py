"""The contexts of our attention, one for each context-parallel group that Megatron makes."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.log import Means
from megatron_burst.config import BurstConfig
from megatron_burst.plugin.attention.masks import Masks
from megatron_burst.plugin.attention.shapes import shape_of


class Contexts:
    """Those of one model, made when its first layer asks.

    Args:
        config: the settings.
        tokens: of a micro-batch on a rank, by which the Ulysses degree is chosen; None: not known.
        masks: of the model, which every rank has to have alike.
    """

    def __init__(self, config: BurstConfig, tokens: int | None, masks: Masks) -> None:
        self._config, self._tokens, self._masks = config, tokens, masks
        self._made: dict[dist.ProcessGroup, BurstContext] = {}
        self.bytes_sent_in_evaluation = 0

    def __iter__(self) -> Iterator[BurstContext]:
        return iter(self._made.values())

    def of(self, model: ModelParallelConfig, pg_collection: Any = None) -> BurstContext:
        """Return the context of the context-parallel group that Megatron has made.

        The first call, of all ranks of the job together, makes it; Megatron's groups of a hierarchy
        say who shares a node.
        """
        group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        if group not in self._made:
            self._masks.compare(self._config.timeout_seconds)
            hierarchy = None
            if model.hierarchical_context_parallel_sizes:
                hierarchy = parallel_state.get_hierarchical_context_parallel_groups()
            shape = shape_of(model, self._config, self._tokens)
            made = BurstContext.create(self._config, group, hierarchy=hierarchy, shape=shape)
            self._made[group] = made
        return self._made[group]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for attention so far."""
        return sum(context.bytes_sent for context in self)

    @property
    def means(self) -> Means:
        """Of the context whose ranks have the most uneven work."""
        every = (context.kept.means for context in self)
        return max(every, key=attrgetter("imbalance"), default=Means())
