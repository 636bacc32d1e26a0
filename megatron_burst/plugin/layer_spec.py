"""Turns Megatron's layer specs into ones with our core attention, and with norms that work."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.config import BurstConfig
from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType
from megatron_burst.plugin.attention.core_attention import SharedState

if TYPE_CHECKING:
    from megatron.training.models.gpt import GPTModelConfig


def burst_layer_spec(spec: Any, config: BurstConfig | SharedState) -> Any:
    """Copy a layer or block spec, our core attention in the place of Megatron's own.

    What stood there serves the layers whose `cp_comm_type` is one of Megatron's own, and has to be
    DotProductAttention or TEDotProductAttention in all others. For frameworks that bypass
    Megatron's parser, which need not have megatron.training; the parser's path calls it, too. All
    ranks of the job must build their first layer with it at the same time: it makes process groups.

    Args:
        spec: a ModuleSpec of a layer, or TransformerBlockSubmodules; dense or MoE layers, local or
            TransformerEngine.
        config: the settings, or the shared state of a model that is built in several parts.

    Raises:
        ValueError: the spec has no core attention.
    """
    shared = config if isinstance(config, SharedState) else SharedState(config)
    replaced = []

    def rewrite(name: str, value: Any) -> Any:
        if name != "core_attention" or value in (None, IdentityOp):
            return value
        replaced.append(value)
        return ModuleSpec(
            module=CoreAttentionByCommType, params={"shared": shared, "fallback": value}
        )

    result = rewrite_spec(spec, rewrite)
    # A pipeline stage of a block may have no layers, or none with attention.
    if not replaced and not hasattr(spec, "layer_specs"):
        raise ValueError(f"this layer spec has no core_attention to replace: {spec}")
    return result


class LayerSpecProvider:
    """What Megatron's GPT builder calls for the layer spec of one pipeline stage.

    Args:
        spec: the spec that `--spec` named, or a function that makes it; None for Megatron's own.
        shared: the contexts of our attention; None leaves core attention as it is.
    """

    def __init__(self, spec: Any, shared: SharedState | None) -> None:
        self._spec = spec
        self.shared = shared

    def __call__(self, model_config: "GPTModelConfig", vp_stage: int | None = None) -> Any:
        """Return the stage's layer spec or block spec."""
        spec = self._original(model_config, vp_stage)
        if self.shared is not None:
            # Here, not in the first layer: all ranks come by, even those of a stage without layers.
            if parallel_state.model_parallel_is_initialized():
                self.shared.get_megatrons(model_config.transformer)
            spec = burst_layer_spec(spec, self.shared)
        if not transformer_block.HAVE_TE:
            return block_spec(spec, model_config.transformer, vp_stage)
        # All is TransformerEngine's but the layers' norms under --transformer-impl local.
        return with_sequence_parallel_norm(spec)

    def _original(self, model_config: "GPTModelConfig", vp_stage: int | None) -> Any:
        if self._spec is None:
            from megatron.training.models.gpt import default_layer_spec  # of Megatron's loop alone

            return default_layer_spec(model_config, vp_stage)
        if isinstance(self._spec, ModuleSpec) or not callable(self._spec):
            return self._spec
        takes_stage = "vp_stage" in inspect.signature(self._spec).parameters
        return self._spec(model_config, **({"vp_stage": vp_stage} if takes_stage else {}))


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


def rewrite_spec(spec: Any, rewrite: Callable[[str, Any], Any], name: str = "") -> Any:
    """Copy a spec, each value replaced by `rewrite(field name, value)` before it is gone through.

    Goes through dataclasses (ModuleSpec, ...Submodules), lists, tuples, dicts and
    `functools.partial`, however nested; an item of a container has the name of the container's
    field. Every other value is kept as it is.
    """
    spec = rewrite(name, spec)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return dataclasses.replace(
            spec,
            **{
                field.name: rewrite_spec(getattr(spec, field.name), rewrite, field.name)
                for field in dataclasses.fields(spec)
                if field.init
            },
        )

    def walk(value: Any) -> Any:
        return rewrite_spec(value, rewrite, name)

    if isinstance(spec, functools.partial):
        keywords = {key: walk(value) for key, value in spec.keywords.items()}
        return functools.partial(walk(spec.func), *map(walk, spec.args), **keywords)
    if type(spec) in (list, tuple):
        return type(spec)(walk(item) for item in spec)
    if type(spec) is dict:
        return {key: walk(value) for key, value in spec.items()}
    return spec
