"""Losses of multi-token prediction (MTP) as the whole sequence has them, on any number of ranks."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention
from megatron_burst.plugin.attention.documents import PackedDocuments
from megatron_burst.plugin.calls import after_calls, before_calls
from megatron_burst.plugin.compat import is_first_of_its_stage
from megatron_burst.plugin.hooks.row_exchange import RowExchange

logger = logging.getLogger(__name__)

_TAKES_LISTS = "tensors" in inspect.signature(multi_token_prediction.roll_tensor).parameters
# Dev's log divides the losses of all ranks by their tokens; others take the mean over the ranks.
_LOGS_SUMS = hasattr(multi_token_prediction.MTPLossLoggingHelper, "save_loss_to_tracker")


class MtpLosses:
    """A pre-wrap hook of Megatron's model builders: MTP's losses do not depend on the CP size.

    Append it to `pre_wrap_hooks` of a GPTModelConfig or HybridModelConfig, behind `ChunkedHead`.
    Megatron divides the losses of a head by the unmasked tokens of each context-parallel rank, so
    that a token weighs more where its neighbours are masked, and with --calculate-per-token-loss
    nothing on a rank that has no token of its own but gets one of its neighbour's.
    """

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to those stages of a model that make losses of MTP; return all."""
        for model in models:
            if not (model.post_process and model.config.mtp_num_layers):
                continue
            is_tied = model.share_embeddings_and_output_weights and model.mtp_process
            if is_tied and not model.pre_process:
                # Of several stages the last: the output layer uses the weight of the heads. With
                # its own beside it Megatron, 0.19 and main, can neither save nor load the model.
                model.output_layer.weight = None
            if model.pg_collection.cp.size() > 1:
                _HeadLosses(model)
                if is_first_of_its_stage():
                    logger.setLevel(logging.INFO)
                logger.info("MTP: losses are divided by the tokens of all context-parallel ranks")
        return models


def name_mtp_layers(models: list[Any]) -> list[Any]:
    """Let checks call MTP's layers, numbered from 1 like the decoder's, by their place: a hook."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, BurstCoreAttention) and name.startswith("mtp."):
                module.name_layer(name.removesuffix(".self_attention.core_attention"))
    return models


class Rolls:
    """Stands in for Megatron's `roll_tensor` while one model runs forward.

    Megatron's own reckons with zigzag, of the whole sequence or of each document. Here every token
    gets what comes next in its document, as on one rank. Only the calls of this model see it.
    """

    def __init__(self, model: Any) -> None:
        self._exchange: RowExchange | None = None
        self._megatrons: Any = None
        after_calls(model, self._end, always_call=True)

    def begin(self, exchange: RowExchange) -> None:
        """Take the moves of the micro-batch; the end of the model's forward puts all back."""
        self._exchange, self._megatrons = exchange, multi_token_prediction.roll_tensor
        multi_token_prediction.roll_tensor = self._roll

    def _roll(self, tensor: Any, *_: Any, return_sum: bool = True, **options: Any) -> Any:
        """Return tensor [batch, rows] moved on by one, and its sum; `return_sum` is main's.

        Dev's takes a list of them, and what comes behind the last token of each, and returns a
        list.
        """
        assert self._exchange is not None
        if isinstance(tensor, list):
            fills = options.get("fill_values") or [0] * len(tensor)
            next_of = self._exchange.next
            return [
                ~next_of(~x) if fill is True else next_of(x)
                for x, fill in zip(tensor, fills, strict=True)
            ]
        moved = None if tensor is None else self._exchange.next(tensor)
        return moved, None if moved is None or not return_sum else moved.sum()

    def _end(self, *_: Any) -> None:
        if self._exchange is not None:
            multi_token_prediction.roll_tensor = self._megatrons
            self._exchange = None


class _HeadLosses:
    """Stands in for `compute_language_model_loss` of one model."""

    def __init__(self, model: Any) -> None:
        self._config, self._group = model.config, model.pg_collection.cp
        self._losses: Callable[[Tensor, Any], Tensor] = model.compute_language_model_loss
        self._labels: Tensor | None = None
        self._mask: Tensor | None = None
        self._heads: Iterator[tuple[Tensor | int, Tensor]] | None = None
        model.compute_language_model_loss = self.losses
        before_calls(model, self._before)

    def _before(self, _: Any, given: Mapping[str, Any]) -> None:
        packed = given.get("packed_seq_params")
        if not isinstance(packed, PackedDocuments | None):
            raise ValueError(
                f"documents, MTP and {self._group.size()} context-parallel ranks: Megatron moves "
                "tokens as if every document were in zigzag: take --context-parallel-algo burst, "
                "or append SequenceHooks(shared) to pre_wrap_hooks before MtpLosses()"
            )
        self._labels, self._mask, self._heads = given.get("labels"), given.get("loss_mask"), None

    def losses(self, labels: Tensor, logits: Any) -> Tensor:
        """Return losses [batch, tokens]; Megatron asks for those of the heads first, in order."""
        losses = self._losses(labels, logits)
        if labels is self._labels or not torch.is_grad_enabled():
            return losses
        if self._heads is None:
            self._heads = self._weights(losses)
        shown, weights = next(self._heads)
        ours = losses.view_as(losses)  # whose gradient is not what Megatron weighs them with
        if ours.requires_grad:
            ours.register_hook(
                lambda grad: (weights * MTPLossAutoScaler.main_loss_backward_scale).type_as(grad)
            )
        return ours * shown

    def _weights(self, losses: Tensor) -> Iterator[tuple[Tensor | int, Tensor]]:
        """Yield for each head what makes Megatron's figure of its log right, and the gradient."""
        config, ranks = self._config, self._group.size()
        mask = torch.ones_like(losses) if self._mask is None else self._mask
        if self._labels is None:  # Megatron makes them of the tokens
            mask = _roll(mask, self._group)
        masks = [mask]
        for _ in range(config.mtp_num_layers):
            masks.append(_roll(masks[-1], self._group))
        here = torch.stack([mask.sum() for mask in masks])
        everywhere = here.clone()
        dist.all_reduce(everywhere, group=self._group)
        here, everywhere = here.clamp(min=1), everywhere.clamp(min=1)
        # Megatron's data parallelism takes the mean over the ranks, or divides by all tokens.
        numerator = everywhere[0] if config.calculate_per_token_loss else ranks
        scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
        for mask, own, total in zip(masks[1:], here[1:], everywhere[1:], strict=True):
            shown = 1 if config.calculate_per_token_loss and _LOGS_SUMS else ranks * own / total
            yield shown, mask * (scale * numerator / total)


def _roll(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what Megatron's `roll_tensor`, or ours, moves on by one; dev's takes a list."""
    given = [tensor] if _TAKES_LISTS else tensor
    rolled: Tensor = multi_token_prediction.roll_tensor(given, cp_group=group)[0]
    return rolled
