"""Our attention in the core-attention slot of Megatron's layer spec."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_burst.config import Algorithm, BurstConfig
from megatron_burst.context import BurstContext
from megatron_burst.mask import Mask
from megatron_burst.plugin.limits import refusals
from megatron_burst.ring_attention import ring_attention

_MASKS = {AttnMaskType.causal: Mask.causal(), AttnMaskType.no_mask: Mask.full()}


class ContextPool:
    """The contexts of one model, one a context-parallel group, shared by its layers."""

    def __init__(self, config: BurstConfig) -> None:
        self.config = config
        self.bytes_sent_in_evaluation = 0
        self._contexts: dict[dist.ProcessGroup, BurstContext] = {}

    def get(
        self, group: dist.ProcessGroup, hierarchy: Sequence[dist.ProcessGroup] | None = None
    ) -> BurstContext:
        """Return the group's context, made at the first call by all ranks of the job together.

        Args:
            group: the context-parallel group.
            hierarchy: Megatron's process groups within the node and between nodes, to be adopted.
        """
        if group not in self._contexts:
            self._contexts[group] = BurstContext.create(self.config, group, hierarchy=hierarchy)
        return self._contexts[group]

    def get_megatrons(self, config: ModelParallelConfig, pg_collection: Any = None) -> BurstContext:
        """Return the context of the context-parallel group that Megatron has made."""
        group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        hierarchy = None
        if config.hierarchical_context_parallel_sizes:
            hierarchy = parallel_state.get_hierarchical_context_parallel_groups()
        return self.get(group, hierarchy)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for attention so far."""
        return sum(context.bytes_sent for context in self._contexts.values())


class CoreAttentionByCommType:
    """What stands in the spec: builds our core attention or the one that stood there before.

    `cp_comm_type` decides, layer by layer: the name of one of our algorithms, or None (Megatron
    passes none at a CP size of 1), is ours; any other value is Megatron's own class's to handle.
    A class, because Megatron's `build_module` takes nothing else.
    """

    def __new__(
        cls, *, pool: ContextPool, fallback: Any, cp_comm_type: str | None = None, **kwargs: Any
    ) -> Any:
        """Return the module that handles `cp_comm_type`."""
        ours = pool.config.algorithm.value
        if cp_comm_type in (None, ours):
            return BurstCoreAttention(pool=pool, **kwargs)
        if cp_comm_type in [algorithm.value for algorithm in Algorithm]:
            raise ValueError(
                f"--cp-comm-type {cp_comm_type} does not agree with --context-parallel-algo {ours}"
            )
        return build_module(fallback, cp_comm_type=cp_comm_type, **kwargs)


class BurstCoreAttention(MegatronModule):
    """`ring_attention` under the contract of Megatron's `CoreAttentionInterface`.

    Without parameters, so that checkpoints fit any other core attention. Takes the constructor
    arguments of Megatron's own class.

    Raises:
        ValueError: the transformer config asks for what our attention cannot do.
    """

    def __init__(
        self,
        *,
        pool: ContextPool,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        reasons = refusals(config)
        if attention_dropout:
            reasons.append(f"attention_dropout = {attention_dropout}: only 0 is possible")
        if attention_type != "self":
            reasons.append(f"attention_type = {attention_type}: only self-attention is supported")
        if reasons:
            raise ValueError(f"layer {layer_number} cannot use burst:\n  " + "\n  ".join(reasons))
        self._pool = pool
        self._context = pool.get_megatrons(config, pg_collection)
        self._attn_mask_type = attn_mask_type
        self._softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend: query [s, b, heads, d], key and value [s, b, kv heads, d] -> [s, b, heads · d].

        `s` is this rank's part of the sequence in Megatron's zigzag order.

        Raises:
            ValueError: a mask, bias or packing that the ring would have to ignore.
        """
        mask = _mask(attn_mask_type or self._attn_mask_type)
        _refuse_tensors(
            {
                "attention_mask": (attention_mask, "--no-create-attention-mask-in-dataloader"),
                "attention_bias": (attention_bias, "no attention bias"),
                "packed_seq_params": (packed_seq_params, "unpacked sequences"),
            }.items()
        )
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # sbhd -> bshd
        sent = self._context.bytes_sent
        out = ring_attention(q, k, v, self._context, mask=mask, softmax_scale=self._softmax_scale)
        if not self.training:
            self._pool.bytes_sent_in_evaluation += self._context.bytes_sent - sent
        return out.transpose(0, 1).flatten(2)


def _mask(mask_type: AttnMaskType) -> Mask:
    if mask_type not in _MASKS:
        raise ValueError(
            f"attention mask type {mask_type.name} is not supported; there are: "
            f"{', '.join(m.name for m in _MASKS)}"
        )
    return _MASKS[mask_type]


def _refuse_tensors(inputs: Iterable[tuple[str, tuple[Any, str]]]) -> None:
    for name, (given, instead) in inputs:
        if given is not None:
            raise ValueError(f"{name} cannot be honoured in a ring; use {instead}")
