"""Which core attention a layer gets: ours, or the one that its spec had."""

import functools
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from megatron_burst.config import Algorithm
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention
from megatron_burst.plugin.attention.layer_algorithms import MEGATRONS
from megatron_burst.plugin.attention.shared_state import SharedState

# Ours computes what these do. Another class, a subclass of them too, is there for what it changes.
_REPLACEABLE = (DotProductAttention, TEDotProductAttention)


class CoreAttentionByCommType:
    """What stands in the spec: builds our core attention or the one that stood there before.

    `cp_comm_type` decides, layer by layer: the name of the configuration's algorithm is ours, and
    so is None (Megatron passes none at a CP size of 1); its own are left to what stood there.
    A class, because Megatron's `build_module` takes nothing else.

    Raises:
        ValueError: it names another algorithm of ours, ours would replace another class than
            DotProductAttention and TEDotProductAttention, or what stood there would ignore the
            block mask.
    """

    def __new__(
        cls, *, shared: SharedState, fallback: Any, cp_comm_type: str | None = None, **given: Any
    ) -> Any:
        """Return the module that handles `cp_comm_type`, built with what Megatron has `given`."""
        config, layer_number = given["config"], given["layer_number"]
        stood, parameters = _class_and_parameters(fallback)
        what = f"layer {layer_number} has {getattr(stood, '__qualname__', repr(stood))}"
        is_replaceable = any(stood is each for each in _REPLACEABLE)
        name = cp_comm_type
        if name is None and not is_replaceable:  # Megatron passes none at CP 1, and to MLA's base
            names = config.cp_comm_type
            name = names[layer_number - 1] if isinstance(names, list) else names
        if name is not None and name not in list(Algorithm):
            if shared.config.block_mask is not None:
                raise ValueError(f"{what}, which knows no --burst-block-mask: drop it")
            return fallback(cp_comm_type=cp_comm_type, **given)
        if name not in (None, shared.config.algorithm):
            raise ValueError(
                f"layer {layer_number}: cp_comm_type {name}, and our layers of this model run "
                f"{shared.config.algorithm}: name that for it, or one of {', '.join(MEGATRONS)}"
            )
        if not is_replaceable:
            raise ValueError(
                f"{what} for its core attention, and ours does not do what it does (only "
                "DotProductAttention and TEDotProductAttention are replaced): keep it by one of "
                f"{', '.join(MEGATRONS)} for this layer in --cp-comm-type (cp_comm_type of the "
                "TransformerConfig), or drop --context-parallel-algo"
            )
        return BurstCoreAttention(
            shared=shared,
            saves_extra_state=stood is TEDotProductAttention,
            **parameters,
            **given,
        )


def _class_and_parameters(core_attention: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class that a spec has for core attention, and the arguments it brings along."""
    if isinstance(core_attention, ModuleSpec):
        return get_module(core_attention), core_attention.params
    if isinstance(core_attention, functools.partial):
        return core_attention.func, core_attention.keywords
    return core_attention, {}
