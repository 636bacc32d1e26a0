"""A layer's MLP in chunks of tokens: what lives between its two products is one chunk's."""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_burst.plans.choice.mlp_chunks import choose_mlp_chunks
from megatron_burst.plugin.limits import MLP_LIMITS, MLP_WORKING
from megatron_burst.plugin.models import need_language_models
from megatron_burst.plugin.refusals import broken_limits, refuse_all
from megatron_burst.plugin.row_chunks import in_row_chunks, is_in_backward, unmade
from megatron_burst.plugin.training_config import MlpConfig

logger = logging.getLogger(__name__)


class ChunkedMlps:
    """A pre-wrap hook of Megatron's model builders: dense MLPs and shared experts run in chunks."""

    def __init__(self, config: MlpConfig) -> None:
        self._config = config

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the pipeline stages of a model and return them."""
        need_language_models("--mlp-chunks", models)
        for model in models:
            reasons = broken_limits(MLP_LIMITS, model.config, MLP_WORKING)
            refuse_all("--mlp-chunks cannot run this", reasons)
            replayed = _replayed_last(model)
            mlps = [ChunkedMlp(*each, self._config.chunks) for each in _mlps(model, replayed)]
            for layer in replayed:
                layer.register_forward_hook(_forget_output)
            logger.info("--mlp-chunks %s: %d MLPs", self._config.chunks or "auto", len(mlps))
        return models


def _mlps(model: Any, replayed: Sequence[Any]) -> Iterator[tuple[MLP, bool]]:
    """Yield the MLPs of a model, and whether their output is read when their layer is replayed.

    A dense MLP's is added to the residual, and a sum's gradient needs neither summand; only in the
    last layer of a checkpoint, of the decoder's, is nothing behind that sum.
    """
    last = {id(layer) for layer in replayed}
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            if isinstance(layer.mlp, MLP):
                yield layer.mlp, id(layer) not in last
            elif isinstance(shared := getattr(layer.mlp, "shared_experts", None), MLP):
                yield shared, True


def _replayed_last(model: Any) -> Sequence[Any]:
    """Return the decoder's layers that are the last of a checkpoint of a full recompute."""
    config, layers = model.config, [*model.decoder.layers]
    if config.recompute_granularity != "full":
        return ()
    together = 1 if config.recompute_method == "block" else config.recompute_num_layers
    return [x for i, x in enumerate(layers, 1) if i % together == 0 or i == len(layers)]


def _forget_output(_: Any, __: Any, output: Any) -> None:
    """Free what a layer's replay returns: its gradient is taken, and its values nobody reads."""
    if is_in_backward():
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        hidden.data = unmade(hidden)


class ChunkedMlp:
    """Stands in for the `forward` of one MLP; equals it, but for the order of sums over tokens.

    Args:
        mlp: whose forward is replaced; rows [tokens, batch] do not depend on each other.
        output_is_read: whether the values of the output matter in the replay of a checkpoint.
        chunks: how many; None chooses.
    """

    def __init__(self, mlp: MLP, output_is_read: bool, chunks: int | None) -> None:
        self._mlp, self._forward, self._chunks = mlp, mlp.forward, chunks
        self._output_is_read = output_is_read
        self._bias: Tensor | None = None  # what Megatron adds to the output itself
        self._returns_bias = False
        mlp.forward = self

    def __call__(
        self, hidden: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return what the MLP returns for hidden states [tokens, batch, hidden]."""
        sizes = hidden.shape[:-1].numel(), hidden.shape[-1], self._between
        tokens = math.ceil(len(hidden) / (self._chunks or choose_mlp_chunks(*sizes)))
        # The replay of a checkpoint that does not read it.
        weights, is_idle = self._mlp.parameters(), not self._output_is_read and is_in_backward()
        output = in_row_chunks(hidden, self.run, tokens, weights, is_idle=is_idle)
        return (output, self._bias) if self._returns_bias else output

    @property
    def _between(self) -> float:
        """Numbers of a token between the products, on this rank."""
        config = self._mlp.config
        ranks = 1 if config.sequence_parallel else self._mlp.tp_group.size()
        return config.ffn_hidden_size * (3 if config.gated_linear_unit else 2) / ranks

    def run(self, piece: Tensor) -> Tensor:
        """Return the output of the MLP for some tokens, without the bias that comes beside it."""
        result = self._forward(piece)
        self._returns_bias = isinstance(result, tuple)
        output, bias = result if isinstance(result, tuple) else (result, None)
        if bias is not None and all(bias is not weight for weight in self._mlp.parameters()):
            raise ValueError(
                "--mlp-chunks: the bias behind this MLP is no parameter of it, so its gradient "
                "would be lost: drop --mlp-chunks"
            )
        self._bias = bias
        return output
