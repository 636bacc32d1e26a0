"""What the tensors of all layers of a model have in common, so that heads may be shared out."""

from dataclasses import replace

from megatron.core import ModelParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_burst.config import BurstConfig, Mla
from megatron_burst.plans.choice.cost import Shape


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
