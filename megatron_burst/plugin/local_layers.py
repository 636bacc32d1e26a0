"""What Megatron's local layers lack without TransformerEngine: norms, and a hybrid stack."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_burst.plugin.rewrite_spec import rewrite_spec
from megatron_burst.plugin.row_chunks import in_row_chunks

_NORM_NUMBERS = 2**24  # of a block of rows


class RMSNormByRows(torch.nn.RMSNorm):
    """Torch's own, in blocks of rows where torch has no kernel for it: on the CPU.

    There it makes copies of all rows in float32, in the backward as well.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [tokens, batch, hidden]; few rows at once as torch does."""
        rows = max(1, _NORM_NUMBERS // max(1, x[:1].numel()))
        if x.is_cuda or len(x) <= rows:
            return super().forward(x)
        return in_row_chunks(x, super().forward, rows, [self.weight])


class SequenceParallelNorm:
    """Megatron's `WrappedTorchNorm`, which refuses sequence parallelism, made to do it.

    Calling the class returns a torch module itself. Its parameters carry `sequence_parallel`:
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
        if isinstance(norm, torch.nn.RMSNorm):
            norm = RMSNormByRows(hidden_size, eps=eps)
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


def _with_qk_norms(submodules: Any, config: Any, *names: str) -> Any:
    """Return the submodules of an attention with norms that --qk-layernorm asks for."""
    if not config.qk_layernorm or config.qk_l2_norm:
        return submodules
    return dataclasses.replace(submodules, **dict.fromkeys(names, SequenceParallelNorm))


class LocalSelfAttention(SelfAttention):
    """Megatron's, which takes TransformerEngine's norms for --qk-layernorm unless a spec has some.

    A spec may have them with --qk-layernorm alone, so the class that it names puts them in.
    """

    def __init__(self, config: Any, submodules: Any, *given: Any, **named: Any) -> None:
        submodules = _with_qk_norms(submodules, config, "q_layernorm", "k_layernorm")
        super().__init__(config, submodules, *given, **named)


class LocalMLASelfAttention(MLASelfAttention):
    """The same of multi-latent attention; its queries may have no latents to normalise."""

    def __init__(self, config: Any, submodules: Any, *given: Any, **named: Any) -> None:
        names = ["kv_layernorm", *["q_layernorm"] * (config.q_lora_rank is not None)]
        super().__init__(config, _with_qk_norms(submodules, config, *names), *given, **named)


class LocalHybridStack(HybridStack):
    """Megatron's `HybridStack`, whose norm behind the last layer is TransformerEngine's alone."""

    def __init__(
        self, config: TransformerConfig, *args: Any, post_layer_norm: bool = True, **options: Any
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, **options)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = SequenceParallelNorm(
                config, config.hidden_size, config.layernorm_epsilon
            )


# By the layers of a hybrid stack: their norm, and the linear layer in whose parameters
# TransformerEngine keeps it, in checkpoints too.
_FUSED_NORMS: Mapping[str, tuple[str, str]] = {
    "mamba_layer": ("norm", "mixer.in_proj"),
    "gdn_layer": ("input_layernorm", "self_attention.in_proj"),
    "attention_layer": ("input_layernorm", "self_attention.linear_qkv"),
    "mlp_layer": ("pre_mlp_layernorm", "mlp.linear_fc1"),
}
_LOCAL = (  # no mapping: without TransformerEngine its names are mocks
    (te.TELayerNormColumnParallelLinear, ColumnParallelLinear),
    (te.TEColumnParallelLinear, ColumnParallelLinear),
    (te.TELinear, ColumnParallelLinear),
    (te.TERowParallelLinear, RowParallelLinear),
    (te.TEDotProductAttention, DotProductAttention),
    (te.TENorm, SequenceParallelNorm),
    (SelfAttention, LocalSelfAttention),
    (MLASelfAttention, LocalMLASelfAttention),
)
# With --qk-layernorm TransformerEngine keeps the norms of latents in the linear layers behind.
_LATENT_NORMS = {
    f"self_attention.{kind}_layernorm.": f"self_attention.linear_{kind}_up_proj.layer_norm_"
    for kind in ("q", "kv")
}


def local_stack_spec() -> ModuleSpec:
    """Megatron's `hybrid_stack_spec`, which is TransformerEngine's alone, of its local layers.

    Checkpoints of the one fit the other. On a GPU Mamba and GDN layers need their own packages.
    """

    def localised(name: str, value: Any) -> Any:
        if name == "moe_layer":
            mlp = get_moe_module_spec(use_te=False, num_experts=1)  # any number but None
            value = _with_submodules(value, mlp=mlp)
        if name == "mla_layer":
            value = _with_submodules(value, sharded_state_dict_keys_map=_LATENT_NORMS)
        if name in _FUSED_NORMS:
            norm, linear = _FUSED_NORMS[name]
            names = {f"{norm}.": f"{linear}.layer_norm_"}
            value = _with_submodules(
                value, **{norm: SequenceParallelNorm}, sharded_state_dict_keys_map=names
            )
        return next((local for stock, local in _LOCAL if value is stock), value)

    spec: ModuleSpec = rewrite_spec(hybrid_stack_spec, localised)
    return dataclasses.replace(spec, module=LocalHybridStack)


def local_variant_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Megatron's block spec of a GPT with gated-delta-net layers, of its local layers.

    --linear-attention-freq says which layers these are. Checkpoints of the one fit the other.
    """
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    block = get_gpt_decoder_block_spec(
        plain, False, config.normalization, config.qk_l2_norm, vp_stage=vp_stage
    )
    assert block.layer_specs is not None
    mixer = local_stack_spec().submodules.gdn_layer.submodules.self_attention
    norm, linear = _FUSED_NORMS["gdn_layer"]
    here = get_linear_attention_pattern(config)[get_transformer_layer_offset(config, vp_stage) :]
    for number, layer in enumerate(block.layer_specs):
        if here[number]:
            names = layer.submodules.sharded_state_dict_keys_map
            names = {**names, f"{norm}.": f"{linear}.layer_norm_"}
            changes = {"self_attention": mixer, "sharded_state_dict_keys_map": names}
            block.layer_specs[number] = _with_submodules(layer, **changes)
    return block


def _with_submodules(spec: Any, **changes: Any) -> Any:
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **changes))
