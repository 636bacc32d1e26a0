"""Megatron's hook for a model's output: the chunked loss in the place of logits and loss."""

import functools
import inspect
import logging
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_burst.config import LmHeadConfig
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import Chunking
from megatron_burst.loss.function import apply
from megatron_burst.plugin.compat import is_first_of_its_stage
from megatron_burst.plugin.hooks.main_grad import fused_kernel, weight_sum
from megatron_burst.plugin.limits import lm_head_refusals

logger = logging.getLogger(__name__)

IGNORED = -100  # in Megatron's labels


class ChunkedHead:
    """A pre-wrap hook of Megatron's model builders that gives GPT models the chunked loss.

    Append it to `pre_wrap_hooks` of a GPTModelConfig. Calls without labels keep Megatron's path.
    """

    def __init__(self, config: LmHeadConfig) -> None:
        self.config = config

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to those pipeline stages among `models` that make the output; return all.

        Raises:
            ValueError: a model or its settings that the chunked loss cannot honour.
        """
        for model in models:
            if not isinstance(model, GPTModel):
                raise ValueError(
                    f"--lm-head-loss {self.config.loss}: {type(model).__name__} has no hook for "
                    "its output, only GPTModel has"
                )
            if model.post_process:
                _check(model)
                output = ChunkedOutput(self.config, model.config)
                model.register_forward_pre_hook(
                    functools.partial(_add_output_processor, output), with_kwargs=True
                )
        return models


def _check(model: GPTModel) -> None:
    layer = model.output_layer
    reasons = lm_head_refusals(model.config)
    if type(layer) is not ColumnParallelLinear:
        reasons.append(f"the output layer is a {type(layer).__name__}, not a ColumnParallelLinear")
    elif layer.bias is not None:
        reasons.append("the output layer has a bias")
    elif layer.gtp_remat_size > 1:
        reasons.append(f"the output layer is spread over {layer.gtp_remat_size} GTP ranks")
    if reasons:
        raise ValueError("--lm-head-loss chunked cannot run this:\n  " + "\n  ".join(reasons))


def _add_output_processor(
    output: "ChunkedOutput", model: GPTModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Answer a call of the model that has labels."""
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    if given.get("labels") is None:
        return None
    if given.get("output_processor") is not None:
        raise ValueError(
            "--lm-head-loss chunked and the caller both bring an output_processor: drop one"
        )
    return args, {**kwargs, "output_processor": output}


class ChunkedOutput:
    """An `output_processor`: hidden states and labels in, losses [batch, tokens] in float32 out.

    Says once in the log how it computes.
    """

    def __init__(self, config: LmHeadConfig, transformer: Any) -> None:
        self._config = config
        self._said: set[str] = set()
        self._kernel_name, self._kernel = fused_kernel(transformer.gradient_accumulation_fusion)
        if is_first_of_its_stage():  # not the first rank of the job where there are stages
            logger.setLevel(logging.INFO)

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: ColumnParallelLinear,
        output_weight: Tensor | None,
        labels: Tensor,
        scale_logits: Any,
        **_: Any,
    ) -> Tensor:
        """Return what Megatron's `compute_language_model_loss` returns: no mask, no mean.

        Labels may be anything where the caller masks their losses, as in Megatron.
        """
        wait_for_weights(output_layer, hidden_states)
        weight = output_layer.weight if output_weight is None else output_weight
        call = Call(
            ignore_index=IGNORED,
            logit_scale=float(scale_logits(torch.ones((), dtype=torch.float64))),
            chunk_size=self._config.chunk_size,
            memory_mb=self._config.memory_mb,
            group=output_layer.tp_group,
            sequence_parallel=output_layer.sequence_parallel,
            weight_sum=functools.partial(weight_sum, kernel=self._kernel),
            on_chunking=self._say_chunking,
        )
        return apply(hidden_states, weight, labels.t(), call).t().contiguous()

    def _say_chunking(self, chunking: Chunking) -> None:
        text = f"chunked LM head loss: {chunking}, dW by {self._kernel_name}"
        if torch.is_grad_enabled() and text not in self._said:
            self._said.add(text)
            logger.info("%s", text)


def wait_for_weights(layer: torch.nn.Module, hidden: Tensor) -> None:
    """Do what would be done before a call of `layer`, which is used without a call.

    With --overlap-param-gather Megatron's data parallelism waits for late weights in such hooks.

    Raises:
        ValueError: a hook that wants to change the input, or to see the output, logits.
    """
    if layer._forward_hooks:
        raise ValueError(
            f"--lm-head-loss chunked: a forward hook of the output layer wants its logits, which "
            f"never exist: {list(layer._forward_hooks.values())}"
        )
    for key, hook in list(layer._forward_pre_hooks.items()):
        keywords: tuple[Any, ...] = ({},) if key in layer._forward_pre_hooks_with_kwargs else ()
        if hook(layer, (hidden,), *keywords) is not None:
            raise ValueError(
                f"--lm-head-loss chunked: a forward-pre-hook of the output layer changes its "
                f"input: {hook}"
            )
