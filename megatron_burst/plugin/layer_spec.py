"""Turns Megatron's layer, block and hybrid stack specs into ones with our core attention."""

import inspect
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.config import BurstConfig
from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType
from megatron_burst.plugin.attention.latent_layers import WITH_LATENTS, attach_to_megatrons
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.local_layers import (
    block_spec,
    local_stack_spec,
    local_variant_spec,
    with_sequence_parallel_norm,
)
from megatron_burst.plugin.refusals import pattern_refusals, refuse_all
from megatron_burst.plugin.rewrite_spec import rewrite_spec
from megatron_burst.plugin.scans.mixers import with_states_passed


def burst_layer_spec(spec: Any, config: BurstConfig | SharedState) -> Any:
    """Copy a layer, block or hybrid stack spec, our core attention in the place of Megatron's own.

    What stood there serves the layers whose `cp_comm_type` is one of Megatron's own, and has to be
    DotProductAttention or TEDotProductAttention in all others. For frameworks that bypass
    Megatron's parser, which need not have megatron.training; the parser's path calls it, too. All
    ranks of the job must build their first layer with it at the same time, of a hybrid stack spec
    their first stack: it makes process groups.

    Args:
        spec: a ModuleSpec of a layer, TransformerBlockSubmodules, or a ModuleSpec of a HybridStack,
            whose attention, MLA and MTP layers get ours; dense or MoE layers, local or
            TransformerEngine.
        config: the settings, or the shared state of a model that is built in several parts; it
            takes a `LayerConfig`, too.

    Raises:
        ValueError: the spec has no core attention.
    """
    shared = config if isinstance(config, SharedState) else SharedState(config)
    replaced = []

    def rewrite(name: str, value: Any) -> Any:
        value = with_states_passed(value, shared)
        if isinstance(value, type):
            value = WITH_LATENTS.get(value, value)
        if name != "core_attention" or value in (None, IdentityOp):
            return value
        replaced.append(value)
        return ModuleSpec(
            module=CoreAttentionByCommType, params={"shared": shared, "fallback": value}
        )

    result = rewrite_spec(spec, rewrite)
    stack = getattr(spec, "submodules", None)
    if isinstance(stack, HybridStackSubmodules):
        params = {**spec.params, "shared": shared, "stack": get_module(spec)}
        return ModuleSpec(module=StackWithContexts, params=params, submodules=result.submodules)
    # A pipeline stage of a block may have no layers, or none with attention.
    if not replaced and not hasattr(spec, "layer_specs"):
        raise ValueError(f"this layer spec has no core_attention to replace: {spec}")
    return result


class StackWithContexts:
    """What stands in the spec of a hybrid stack: builds the stack, and the contexts before it.

    All ranks come by, also those of a pipeline stage without attention.

    Raises:
        ValueError: layers that cannot stand beside our attention.
    """

    def __new__(
        cls, config: TransformerConfig, *, shared: SharedState, stack: type, **given: Any
    ) -> Any:
        """Return the stack, built with what Megatron has `given`."""
        pattern = "".join(given["layer_type_list"])
        reasons = pattern_refusals(pattern, config)
        refuse_all("burst cannot run this hybrid stack", reasons)
        shared.contexts.of(config, given["pg_collection"])
        built = stack(config, **given)
        attach_to_megatrons([built])
        return built


def stack_spec(spec: Any, shared: SharedState | None) -> Any:
    """Return the stack spec of a hybrid model: our attention, and norms that work.

    Args:
        spec: the one that `--spec` named; None for Megatron's own.
        shared: the contexts of our attention; None leaves core attention as it is.
    """
    if spec is None or spec is hybrid_stack_spec:
        spec = hybrid_stack_spec if transformer_block.HAVE_TE else local_stack_spec()
    return _with_ours(spec, shared)


def mtp_spec(spec: Any, shared: SharedState | None) -> Any:
    """Return the block spec of a GPT's MTP layers, or None, as `stack_spec` does a stack's."""
    return None if spec is None else _with_ours(spec, shared)


def _with_ours(spec: Any, shared: SharedState | None) -> Any:
    spec = with_sequence_parallel_norm(spec)
    return spec if shared is None else burst_layer_spec(spec, shared)


class LayerSpecProvider:
    """What Megatron's GPT builder calls for the layer spec of one pipeline stage.

    Args:
        spec: the spec that `--spec` named, or a function that makes it; None for Megatron's own.
        shared: the contexts of our attention; None leaves core attention as it is.
    """

    def __init__(self, spec: Any, shared: SharedState | None) -> None:
        self._spec, self.shared = spec, shared

    def __call__(self, model_config: Any, vp_stage: int | None = None) -> Any:
        """Return the layer spec or block spec of a stage, by Megatron's GPTModelConfig."""
        # A provider of Megatron-Bridge is the TransformerConfig itself.
        transformer = getattr(model_config, "transformer", model_config)
        # Here, not in the first layer: all ranks come by, even those of a stage without layers.
        if self.shared is not None and parallel_state.model_parallel_is_initialized():
            self.shared.contexts.of(transformer)
        spec = _with_ours(self._original(model_config, transformer, vp_stage), self.shared)
        return spec if transformer_block.HAVE_TE else block_spec(spec, transformer, vp_stage)

    def _original(self, model_config: Any, transformer: Any, vp_stage: int | None) -> Any:
        if self._spec is None:
            if transformer.experimental_attention_variant and not transformer_block.HAVE_TE:
                return local_variant_spec(transformer, vp_stage)
            from megatron.training.models.gpt import default_layer_spec  # of Megatron's loop alone

            return default_layer_spec(model_config, vp_stage)
        if isinstance(self._spec, ModuleSpec) or not callable(self._spec):
            return self._spec
        takes_stage = "vp_stage" in inspect.signature(self._spec).parameters
        return self._spec(model_config, **({"vp_stage": vp_stage} if takes_stage else {}))
