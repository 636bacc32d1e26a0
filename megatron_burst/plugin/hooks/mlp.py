"""A layer's MLP in chunks of tokens: what lives between its two products is one chunk's.

A checkpoint around each chunk, as Megatron's are, would run the hook of a weight once a chunk, and
Megatron's data parallelism would reduce the gradient after the first. Here one autograd function
holds all chunks, so that a weight's hook runs once a layer.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.config import MlpConfig
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.plans.mlp_chunks import choose_mlp_chunks
from megatron_burst.plugin.limits import MLP_LIMITS, MLP_WORKING, beyond, refuse_all
from megatron_burst.plugin.models import need_language_models

logger = logging.getLogger(__name__)


class ChunkedMlps:
    """A pre-wrap hook of Megatron's model builders: dense MLPs and shared experts run in chunks."""

    def __init__(self, config: MlpConfig) -> None:
        self._config = config

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the MLPs of all pipeline stages among `models` and return them.

        Raises:
            ValueError: another model than a GPTModel or HybridModel, or settings of one that cannot
                be honoured.
        """
        need_language_models("--mlp-chunks", models)
        for model in models:
            refuse_all(
                "--mlp-chunks cannot run this", beyond(MLP_LIMITS, model.config, MLP_WORKING)
            )
            found = [ChunkedMlp(*each, self._config.chunks) for each in _mlps(model)]
            logger.info("--mlp-chunks %s: %d MLPs", self._config.chunks or "auto", len(found))
        return models


def _mlps(model: Any) -> Iterator[tuple[MLP, bool]]:
    """Yield the MLPs of a model, and whether their output is read when their layer is replayed.

    A dense MLP's is added to the residual, and a sum's gradient needs neither summand; only where
    a checkpoint holds one layer, of the decoder's, is nothing behind that sum.
    """
    replayed = {id(layer) for layer in model.decoder.layers if _is_checkpointed_alone(model.config)}
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            if isinstance(layer.mlp, MLP):
                yield layer.mlp, id(layer) not in replayed
            elif isinstance(shared := getattr(layer.mlp, "shared_experts", None), MLP):
                yield shared, True


def _is_checkpointed_alone(config: TransformerConfig) -> bool:
    """Whether every checkpoint of a full recompute holds one layer."""
    alone = config.recompute_method == "block" or config.recompute_num_layers == 1
    return config.recompute_granularity == "full" and alone


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
        weights = [weight for weight in self._mlp.parameters() if weight.requires_grad]
        output = _InChunks.apply(hidden, self, tokens, *weights)
        return (output, self._bias) if self._returns_bias else output

    @property
    def _between(self) -> float:
        """Numbers of a token between the products, on this rank."""
        config = self._mlp.config
        ranks = 1 if config.sequence_parallel else self._mlp.tp_group.size()
        return config.ffn_hidden_size * (3 if config.gated_linear_unit else 2) / ranks

    @property
    def output_is_idle(self) -> bool:
        """Whether this call replays a checkpoint, inside a backward, that does not read it."""
        return not self._output_is_read and torch._C._current_graph_task_id() != -1

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


class _InChunks(torch.autograd.Function):
    """The MLP chunk by chunk; the backward computes each chunk again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, mlp: ChunkedMlp, tokens: int, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.mlp, ctx.tokens, ctx.weights = mlp, tokens, weights
        if mlp.output_is_idle:  # no memory, and loud where it is read after all
            return hidden.new_full((), math.nan).expand(hidden.shape)
        pieces = hidden.split(tokens)
        first = mlp.run(pieces[0])
        if len(pieces) == 1:
            return first
        output = first.new_empty(len(hidden), *first.shape[1:])
        parts = output.split(tokens)
        parts[0].copy_(first)
        del first
        for part, piece in zip(parts[1:], pieces[1:], strict=True):
            part.copy_(mlp.run(piece))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        asks = ctx.needs_input_grad[0]
        d_hidden = torch.empty_like(hidden) if asks else None
        sums = [_WeightGradient(weight) for weight in ctx.weights]
        for start in range(0, len(hidden), ctx.tokens):
            rows = slice(start, start + ctx.tokens)
            piece = hidden[rows].detach().requires_grad_(asks)
            with torch.enable_grad():
                output = ctx.mlp.run(piece)
            wanted = [piece] * asks + [*ctx.weights]
            found = [*torch.autograd.grad(output, wanted, d_output[rows], allow_unused=True)]
            if d_hidden is not None:
                d_hidden[rows] = found.pop(0)
            for each, gradient in zip(sums, found, strict=True):
                each.add(gradient)
        return d_hidden, None, None, *(each.result() for each in sums)


class _WeightGradient:
    """The gradient of one weight, summed over chunks in float32 (float64 for float64).

    Under gradient accumulation fusion the layer has added a chunk's to `main_grad` by itself, set
    `grad_added_to_main_grad`, and returned a tensor without meaning, of which the last goes on.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._sum: Tensor | None = None
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = False

    def add(self, gradient: Tensor | None) -> None:
        """Add a chunk's gradient; None where the weight has no part in the output."""
        if gradient is None:
            return
        if getattr(self._weight, "grad_added_to_main_grad", False):
            self._sum = gradient
        elif self._sum is None:
            self._sum = gradient.to(accumulation_dtype(gradient.dtype), copy=True)
        else:
            self._sum += gradient

    def result(self) -> Tensor | None:
        """Return what the weight's hook is given."""
        return None if self._sum is None else self._sum.to(self._weight.dtype)
