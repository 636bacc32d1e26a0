"""GPT and hybrid models whose end is Megatron's own, its `forward` and MTP; the rest stands in."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from tests.loss.oracle import from_logits

KINDS = {"gpt": GPTModel, "hybrid": HybridModel}
HEADS = 2


class Decoder(torch.nn.Module):
    """Hidden states [tokens, batch, d] whatever comes in."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden if hidden.requires_grad else torch.nn.Parameter(hidden)

    def forward(self, **_: Any) -> Tensor:
        return self.hidden


class Embedding(torch.nn.Module):
    """Has a weight that the output layer may share."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.word_embeddings = torch.nn.Module()
        self.word_embeddings.weight = weight

    def forward(self, **_: Any) -> None:
        return None


class Heads(torch.nn.Module):
    """Hidden states of MTP's heads, one behind the other, as Megatron's block gives them."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return torch.cat([hidden_states * (1 + n) - n for n in range(HEADS + 1)])


def bare(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    *,
    mtp: bool = False,
    tied: bool = False,
    group: Any = None,
    **settings: Any,
) -> Any:
    """A model without parts but its decoder's output and output layer, with logits and all."""
    size = hidden.shape[-1]
    if mtp:
        settings["mtp_num_layers"] = HEADS
    made = KINDS[kind].__new__(KINDS[kind])
    torch.nn.Module.__init__(made)
    made.config = TransformerConfig(
        num_layers=2, hidden_size=size, num_attention_heads=1, **settings
    )
    made.pre_process, made.post_process, made.mtp_process = tied, True, mtp
    made.share_embeddings_and_output_weights = tied
    made.position_embedding_type = "none"
    made.tp_group, made.pg_collection = group, SimpleNamespace(cp=None, tp=group)
    parameter = weight if weight.requires_grad else torch.nn.Parameter(weight)
    made.decoder, made.mtp = Decoder(hidden), Heads()
    made.embedding = Embedding(parameter if tied else None)
    made.output_layer = _output_layer(None if tied else parameter, group)
    made.compute_language_model_loss = lambda labels, logits: from_logits(
        logits.transpose(0, 1).float(), labels
    )
    return made


def _output_layer(weight: Any, group: Any) -> Any:
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.weight, layer.bias, layer.gtp_remat_size, layer.tp_group = weight, None, 1, group
    layer.gather_output = layer.sequence_parallel = False

    def logits(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        return F.linear(hidden, layer.weight if weight is None else weight), None

    layer.forward = logits
    return layer
