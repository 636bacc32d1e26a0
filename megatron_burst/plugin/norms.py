"""torch's norms under sequence parallelism, where neither TransformerEngine nor Apex brings one."""

import copy
from typing import Any

import torch
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.plugin.spec_walk import rewrite_spec


class SequenceParallelNorm:
    """Megatron's `WrappedTorchNorm`, which refuses sequence parallelism, made to do it.

    Calling the class returns the torch module itself. Its parameters carry `sequence_parallel`:
    every TP rank normalises its own tokens, and Megatron sums the gradients of parameters marked
    so over the TP ranks.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> torch.nn.Module:
        """Build the norm `config.normalization` names, with Megatron's refusals."""
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm: torch.nn.Module = WrappedTorchNorm(alone, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def with_sequence_parallel_norm(spec: Any) -> Any:
    """Copy of a layer or block spec in which `SequenceParallelNorm` replaces `WrappedTorchNorm`.

    The norm behind the last layer is part of a block spec, not of a layer spec: see `block_spec`.
    """
    return rewrite_spec(
        spec, lambda _, value: SequenceParallelNorm if value is WrappedTorchNorm else value
    )


def block_spec(
    spec: Any, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The block spec of this pipeline stage for a layer or block spec, norms replaced.

    A layer spec leaves the norm behind the last layer to Megatron. Without TransformerEngine it
    takes Apex's LayerNorm where Apex is there, for RMSNorm, too, which that one is not; else its
    own `WrappedTorchNorm`. Call it after model parallelism is initialised.
    """
    if not isinstance(spec, TransformerBlockSubmodules):
        last: Any = transformer_block.LayerNormImpl
        if last is FusedLayerNorm and config.normalization != "LayerNorm":
            last = WrappedTorchNorm
        layers = transformer_block.get_num_layers_to_build(config, vp_stage)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=last)
    return with_sequence_parallel_norm(spec)
