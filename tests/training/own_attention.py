"""A user's own core attention, and a `--spec` that has it in every second layer.

It caps scores, which neither Megatron's attention nor ours under Megatron does, and runs over
context-parallel ranks by gathering keys and values.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.models.gpt import default_layer_spec
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plugin.rewrite_spec import rewrite_spec

CAP = 0.5


class SoftCappedAttention(torch.nn.Module):
    """Causal attention whose scores are bounded by `CAP`, over Megatron's zigzag."""

    def __init__(self, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        print(f"layer {layer_number} is soft-capped")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, /, **_: Any) -> Tensor:
        """Attend: [s, b, heads, d] each; returns [s, b, heads * d]."""
        assert mask is None
        group = parallel_state.get_context_parallel_group()
        tokens = len(query) * group.size()
        layout = zigzag(tokens, group.size())
        order = torch.cat([layout.positions(rank) for rank in range(group.size())]).argsort()
        key, value = (torch.cat(all_gather(x.contiguous(), group))[order] for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / query.shape[-1] ** 0.5
        hidden = torch.arange(tokens) > layout.positions(group.rank())[:, None]
        weights = (CAP * torch.tanh(scores / CAP)).masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def gpt(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return Megatron's own block spec, `SoftCappedAttention` in layers 2, 4 and so on."""
    layer = default_layer_spec(config, vp_stage)
    capped = rewrite_spec(
        layer, lambda name, value: SoftCappedAttention if name == "core_attention" else value
    )
    layers = [capped if i % 2 else layer for i in range(config.transformer.num_layers)]
    norm = layer.submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
