"""Turns a Megatron layer spec into one with our core attention."""

import inspect
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_burst.config import BurstConfig
from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType
from megatron_burst.plugin.attention.core_attention import SharedState
from megatron_burst.plugin.norms import block_spec, with_sequence_parallel_norm
from megatron_burst.plugin.spec_walk import rewrite_spec

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
