"""The chunked loss in the place of logits and loss, attached to one built model."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_burst.config import LmHeadConfig
from megatron_burst.kernels.in_triton import why_plain
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import MIB, Chunking, Sizes, within
from megatron_burst.loss.function import apply
from megatron_burst.loss.kept import Keeper
from megatron_burst.plugin.calls import after_calls, before_calls
from megatron_burst.plugin.compat import is_first_of_its_stage
from megatron_burst.plugin.hooks.main_grad import fused_kernel, is_sharded, weight_sum
from megatron_burst.plugin.limits import LM_HEAD_LIMITS
from megatron_burst.plugin.models import LanguageModel, need_language_models
from megatron_burst.plugin.refusals import broken_limits, refuse_all

logger = logging.getLogger(__name__)

IGNORED = -100  # in Megatron's labels
# Of a GPTModel dev's, which can fuse the loss, makes logits as its base does where it does not.
_OUTPUT_LAYERS = (
    ColumnParallelLinear,
    getattr(gpt_model, "LinearCrossEntropyModule", ColumnParallelLinear),
)


class ChunkedHead:
    """A pre-wrap hook of Megatron's model builders that gives models the chunked loss.

    Append it to `pre_wrap_hooks` of a GPTModelConfig or HybridModelConfig. Calls without labels
    keep Megatron's logits; `log_probs` is for those that want them of given tokens alone.
    """

    def __init__(self, config: LmHeadConfig) -> None:
        self.config = config

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to those pipeline stages among `models` that make the output; return all.

        Raises:
            ValueError: a model or its settings that the chunked loss cannot honour.
        """
        need_language_models(f"--lm-head-loss {self.config.loss}", models)
        for model in models:
            if model.post_process:
                _check(model)
                _check_memory(model, self.config)
                ChunkedLoss(self.config, model)
        return models


def _check(model: LanguageModel) -> None:
    layer = model.output_layer
    reasons = broken_limits(LM_HEAD_LIMITS, model.config)
    if type(layer) not in _OUTPUT_LAYERS:
        reasons.append(f"the output layer is a {type(layer).__name__}, not a ColumnParallelLinear")
    elif layer.bias is not None:
        reasons.append("the output layer has a bias")
    elif getattr(layer, "gtp_remat_size", 1) > 1:  # dev has none
        reasons.append(f"the output layer is spread over {layer.gtp_remat_size} GTP ranks")
    refuse_all("--lm-head-loss chunked cannot run this", reasons)


def _check_memory(model: LanguageModel, config: LmHeadConfig) -> None:
    """Refuse a limit now under which the first step could not compute a token.

    Sums of dW that turn out to be apart from its gradient need more, which only that step finds.
    """
    if config.memory_mb is None:
        return
    layer = model.output_layer
    weight = model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    ranks = layer.tp_group.size() if layer.tp_group is not None else 1
    parts = ranks if layer.sequence_parallel else 1
    vocabulary, size = weight.shape
    device = "cuda" if torch.cuda.is_available() else "cpu"  # where it goes
    least = Sizes(
        tokens=parts,
        vocabulary=vocabulary,
        hidden=size,
        dtype=weight.dtype,
        ranks=ranks,
        parts=parts,
        fused=not why_plain(torch.device(device), weight.dtype),
    )
    within(least, int(config.memory_mb * MIB))


def log_probs(model: torch.nn.Module, tokens: Tensor, temperature: float = 1.0, **call: Any) -> Any:
    """Call a model for the log-probabilities of given tokens and the entropies, without logits.

    With the chunked loss attached it equals, without gathered logits or any of -100:

        logits = model(**call).float() / temperature  # [batch, sequence, vocabulary]
        logs = logits.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        return torch.stack([logs.gather(-1, tokens[..., None])[..., 0], entropy], -1)

    Args:
        model: a GPTModel or HybridModel, or what Megatron wrapped around it.
        tokens: [batch, sequence], as labels are: at each position the token that follows. -100 is
            skipped, with zeros.
        temperature: by which the logits are divided.
        call: the arguments of the model, without labels.

    Returns:
        [batch, sequence, 2] in float32, both with gradients; of a pipeline stage before the last
        what the model returns.

    Raises:
        ValueError: a temperature that is not positive, or a last stage without the chunked loss.
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    inner = next(module for module in model.modules() if isinstance(module, LanguageModel))
    if not inner.post_process:
        return model(**call)
    # Not by the loss, for which MtpLosses stands in, too.
    head = getattr(inner.output_layer.forward, "__self__", None)
    if not isinstance(head, ChunkedLoss):
        raise ValueError("log_probs needs the chunked loss: pass --lm-head-loss chunked")
    with head.at_temperature(temperature):
        losses, entropies = model(**call, labels=tokens).unbind(-1)
    return torch.stack([-losses, entropies], -1)


class UnmadeLogits:
    """Stands in for logits [tokens, batch, rows] between the output layer and the loss.

    Serves what Megatron asks there: MuP's factor and, once the loss is computed, which token is the
    likeliest, for MTP's acceptance count. Anything else that reads logits fails.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, scale: float = 1.0) -> None:
        self.hidden, self.weight, self.scale = hidden, weight, scale
        self.labels: Tensor | None = None  # once the losses are asked for
        self.best: list[tuple[Tensor, Tensor]] = []  # largest logits, their rows: of a chunk

    def __mul__(self, factor: float) -> "UnmadeLogits":
        return UnmadeLogits(self.hidden, self.weight, self.scale * factor)

    def size(self, dim: int) -> int:
        """Return the number of rows of this rank, the last dimension."""
        assert dim == -1
        return self.weight.shape[0]

    def max(self, dim: int) -> tuple[Tensor, Tensor]:
        """Return the largest logits among this rank's rows and which they are: [tokens, batch]."""
        assert dim == -1
        values, indices = (torch.cat(chunks, 1) for chunks in zip(*self.best, strict=True))
        batch = self.hidden.shape[1]
        return values.view(-1, batch), indices.view(-1, batch)

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.argmax:
            return args[0].max(**(kwargs or {}))[1]
        return NotImplemented


class ChunkedLoss:
    """The output layer and the loss of one model, in calls of it that have labels.

    The output layer is called, so that hooks run in which data parallelism waits for late weights,
    but hands on what logits are made of, and `compute_language_model_loss` makes the losses
    [batch, tokens] in float32, of MTP's heads too. Says once in the log how it computes.
    """

    def __init__(self, config: LmHeadConfig, model: LanguageModel) -> None:
        self._config, self._layer = config, model.output_layer
        self._make_logits: Callable[..., tuple[Any, None]] = self._layer.forward
        self._megatrons: Callable[[Tensor, Any], Tensor] = model.compute_language_model_loss
        self._labels: Tensor | None = None  # of a call; also its loss mask
        self._mask: Tensor | None = None
        self._temperature: float | None = None  # of a call that wants entropies, too
        self._keeper, self._per_token = Keeper(), model.config.calculate_per_token_loss
        self._counts = bool(model.config.mtp_num_layers)
        self._said: set[str] = set()
        fusion = model.config.gradient_accumulation_fusion
        self._kernel_name, self._kernel = fused_kernel(fusion)
        if self._counts and model.share_embeddings_and_output_weights and model.mtp_process:
            # On the last of several stages Megatron does not say that the embedding needs its own.
            model.shared_embedding_or_output_weight().zero_out_wgrad = True
        self._layer.forward, model.compute_language_model_loss = self.hand_on, self.losses
        before_calls(model, self._before)
        after_calls(model, self._after, always_call=True)
        if is_first_of_its_stage():  # not the first rank of the job where there are stages
            logger.setLevel(logging.INFO)

    def _before(self, _: Any, given: Mapping[str, Any]) -> None:
        self._labels, self._mask = given.get("labels"), given.get("loss_mask")

    def _after(self, *_: Any) -> None:
        self._labels = self._mask = None

    @contextlib.contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Make losses [batch, tokens, 2] in calls meanwhile, with entropies, at a temperature."""
        self._temperature = temperature
        try:
            yield
        finally:
            self._temperature = None

    def _weights(self, labels: Tensor) -> Tensor | None:
        """Return what Megatron's loss multiplies the losses by, but for a factor.

        In most trainings that is a power of two, so that gradients kept in bfloat16 are rounded
        once. Heads of MTP, whose labels are others, have masks of their own.
        """
        mask = self._mask
        if mask is None or labels is not self._labels or mask.shape != labels.shape:
            return None
        mask = mask.float()
        return mask if self._per_token else mask / mask.sum().int().clamp(min=1)

    def hand_on(
        self,
        input_: Tensor,
        weight: Tensor | UnmadeLogits | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Any, None]:
        """Stand in for the output layer's `forward`; with logits that it handed on, for the loss.

        Raises:
            ValueError: gathered logits, of which Megatron's loss on several ranks is wrong, too.
        """
        layer = self._layer
        if isinstance(weight, UnmadeLogits):
            return self._made(weight, input_), None
        if self._labels is None:
            if torch.is_grad_enabled():  # else DDP would drop their dW in a step that has losses
                own: Any = layer.weight if weight is None else weight
                own.zero_out_wgrad = True
            return self._make_logits(input_, weight, runtime_gather_output)
        gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers and layer.tp_group.size() > 1:
            raise ValueError(
                f"--lm-head-loss chunked: labels, and logits gathered from {layer.tp_group.size()} "
                "ranks: drop runtime_gather_output, or pass parallel_output=True to the model"
            )
        return UnmadeLogits(input_, layer.weight if weight is None else weight), None

    def losses(self, labels: Tensor, logits: Any) -> Tensor:
        """Stand in for `compute_language_model_loss`: no mask, no mean.

        Labels may be anything where the caller masks their losses, as in Megatron. Where FSDP
        shards the output layer it is called once more, for its hooks gather the weight before a
        call, and before the backward of what that returns.
        """
        if not isinstance(logits, UnmadeLogits):
            return self._megatrons(labels, logits)
        logits.labels = labels
        if is_sharded(logits.weight) or isinstance(self._layer, FSDPModule):
            losses: Tensor = self._layer(logits.hidden, logits)[0]
            return losses
        return self._made(logits, logits.hidden)

    def _made(self, logits: UnmadeLogits, hidden: Tensor) -> Tensor:
        assert logits.labels is not None
        weights = self._weights(logits.labels)
        temperature = self._temperature if logits.labels is self._labels else None
        counts = self._counts and logits.labels is not self._labels  # of MTP's heads alone
        call = Call(
            ignore_index=IGNORED,
            logit_scale=logits.scale / (temperature or 1.0),
            entropy=temperature is not None,
            chunk_size=self._config.chunk_size,
            memory_mb=self._config.memory_mb,
            group=self._layer.tp_group,
            sequence_parallel=self._layer.sequence_parallel,
            weights=None if weights is None else weights.t(),
            keeper=self._keeper,
            weight_sum=functools.partial(weight_sum, kernel=self._kernel),
            on_chunking=functools.partial(self._say_chunking, logits.weight),
            on_best=(lambda *best: logits.best.append(best)) if counts else None,
        )
        made = apply(hidden, logits.weight, logits.labels.t(), call)
        if temperature is not None:
            return torch.stack(made, -1).transpose(0, 1)
        return made[0].t().contiguous()

    def _say_chunking(self, weight: Tensor, chunking: Chunking) -> None:
        plain = why_plain(weight.device, weight.dtype)
        softmax = f"plain torch ({plain})" if plain else "Triton"
        kernel = "torch" if chunking.keeps else self._kernel_name
        text = f"chunked LM head loss: {chunking}, dW by {kernel}, softmax by {softmax}"
        if torch.is_grad_enabled() and text not in self._said:
            self._said.add(text)
            logger.info("%s", text)
