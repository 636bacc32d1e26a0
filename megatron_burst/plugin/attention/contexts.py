"""The contexts of our attention, one for each context-parallel group that Megatron makes."""

import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.log import Means
from megatron_burst.config import BurstConfig, Mla
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.topology import flat_grid
from megatron_burst.plugin.attention.documents import ranks_of
from megatron_burst.plugin.attention.masks import Masks
from megatron_burst.plugin.training_config import Check, LayerConfig
from megatron_burst.transport.groups import make_groups
from megatron_burst.transport.objects import check_agreement, gather_objects

# Of `parallel_state`: the groups of micro-batches of this rank by their sizes, dev's and others'.
_BY_SIZE = "_DYNAMIC_DP_CP_GROUPS", "_HYBRID_DP_CP_GROUPS"


class Contexts:
    """Those of one model, made when its first layer asks; the arguments are `SharedState`'s.

    On every rank of the job the masks and what layers do around attention have to be alike.
    """

    def __init__(
        self,
        config: BurstConfig,
        layer_config: LayerConfig,
        tokens: int | None,
        masks: Masks,
        batch: int = 1,
    ) -> None:
        self._config, self._layer_config = config, layer_config
        self._sizes, self._masks = (tokens, batch), masks
        self._made: dict[tuple[int, ...], BurstContext] = {}
        self.bytes_sent_in_evaluation = 0

    def __iter__(self) -> Iterator[BurstContext]:
        return iter(self._made.values())

    def of(self, model: ModelParallelConfig, pg_collection: Any = None) -> BurstContext:
        """Return the context of the context-parallel group that Megatron has made.

        The first call, of all ranks of the job together, makes it; Megatron's groups of a hierarchy
        say who shares a node. Where Megatron has made groups for micro-batches of other sizes, it
        makes theirs as well.
        """
        group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        if (ranks := ranks_of(group)) not in self._made:
            is_first = not self._made
            self._compare(group)
            hierarchy = None
            if model.hierarchical_context_parallel_sizes:
                hierarchy = parallel_state.get_hierarchical_context_parallel_groups()
            shape = shape_of(model, self._config, *self._sizes)
            made = BurstContext.create(self._config, group, hierarchy=hierarchy, shape=shape)
            self._made[ranks] = made
            for other in _groups_of_micro_batches() if is_first else ():
                self.add(model, other)
        return self._made[ranks]

    def _compare(self, group: dist.ProcessGroup | None) -> None:
        """Raise a ValueError where ranks of the job would do different things around a call."""
        seconds = self._config.timeout_seconds
        self._masks.compare(seconds)
        if dist.is_initialized() and (group is None or group.size() > 1):
            assert dist.group.WORLD is not None
            what = "--burst-check or --recompute-offload"
            check_agreement(dist.group.WORLD, what, str(self._layer_config), seconds)

    def add(self, model: ModelParallelConfig, group: dist.ProcessGroup) -> None:
        """Make the context of a group that micro-batches may bring, once the model's own is there.

        A collective call of all ranks of the job, each with a group that it is in. Heads are shared
        out as the settings say, over as many ranks as there are.
        """
        ranks, timeout = ranks_of(group), self._config.timeout_seconds
        assert dist.group.WORLD is not None
        said = len(ranks), ranks not in self._made
        every = gather_objects(dist.group.WORLD, "learn whose groups are new", said, timeout)
        if not any(is_new for _, is_new in every):
            return
        if len(ranks) == 1 < max(every)[0]:  # the whole job makes the others' groups
            make_groups(group, flat_grid(1), head_groups((0,), 1), 1, timeout)
        degree = self._config.head_parallel_size
        config = replace(self._config, head_parallel_size=degree and math.gcd(degree, len(ranks)))
        made = BurstContext.create(config, group, shape=shape_of(model, config))
        self._made.setdefault(ranks, made)

    def of_micro_batch(self, packed: Any, own: BurstContext) -> BurstContext:
        """Return the context of the group that `packed_seq_params` bring, `own` without any.

        Raises:
            ValueError: it is the group of nobody's context, or not of the size that it is said.
        """
        group, size = (getattr(packed, name, None) for name in ("cp_group", "local_cp_size"))
        if group is None and size in (None, own.ranks):
            return own
        if group is None and size != 1:
            raise ValueError(
                f"packed_seq_params brings local_cp_size = {size} without a group, and our "
                f"attention runs over ranks {[*ranks_of(own.group)]}: pass its cp_group, too"
            )
        ranks = ranks_of(group)
        if size not in (None, len(ranks)):
            raise ValueError(
                f"packed_seq_params brings local_cp_size = {size} and a cp_group of ranks "
                f"{[*ranks]}: pass the size of the group"
            )
        if ranks == ranks_of(own.group):
            return own
        if self._layer_config.check is Check.REFERENCE:
            raise ValueError(
                f"--burst-check {Check.REFERENCE} knows no cp_group but the model's own, and "
                f"packed_seq_params brings ranks {[*ranks]}: drop it"
            )
        if len(ranks) == 1 and ranks not in self._made:
            alone = replace(self._config, head_parallel_size=None)
            self._made[ranks] = BurstContext.alone(alone)
        if ranks not in self._made:
            raise ValueError(
                f"packed_seq_params brings a cp_group of ranks {[*ranks]}, for which our attention "
                "has made no groups of its own: behind the first layer let all ranks call "
                "shared.contexts.add(config, cp_group), each with the one that it is in"
            )
        return self._made[ranks]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for attention so far."""
        return sum(context.bytes_sent for context in self)

    @property
    def means(self) -> Means:
        """Of the context whose ranks have the most uneven work."""
        every = (context.kept.means for context in self)
        return max(every, key=attrgetter("imbalance"), default=Means())


def shape_of(
    model: ModelParallelConfig, config: BurstConfig, tokens: int | None = None, batch: int = 1
) -> Shape | str:
    """Return the shape of a rank's tensors in every layer; `tokens` are a rank's, of the batch.

    Or why no choice goes by it: messages of some layers are fewer than those of all their keys.
    """
    if not isinstance(model, TransformerConfig) or model.heterogeneous_block_specs:
        return "the heads of its layers are not known"
    if tokens is None:
        return "how many tokens a rank has is not known"
    if config.block_mask is not None or model.window_size:
        return "its rings send less under a window or a block mask"
    if model.multi_latent_attention and config.mla is not Mla.HEADS:
        return "its rings may send latents, which have no heads"
    tensor, kv_heads = model.tensor_model_parallel_size, model.num_query_groups
    head_dims = model.kv_channels, model.kv_channels
    if model.multi_latent_attention:
        kv_heads = model.num_attention_heads
        head_dims = model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    heads = model.num_attention_heads // tensor, max(kv_heads // tensor, 1)
    shape = Shape.of(tokens, heads, head_dims, model.params_dtype.itemsize, config.grad_dtype)
    return replace(shape, batch=batch)


def _groups_of_micro_batches() -> list[dist.ProcessGroup]:
    """Return this rank's groups of hybrid or dynamic context parallelism, the largest last."""
    by_size: dict[int, dist.ProcessGroup] = {}
    for name in _BY_SIZE:
        by_size |= getattr(parallel_state, name, {})
    if not by_size:
        return []
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return [*(by_size[size] for size in sorted(by_size)), whole]
