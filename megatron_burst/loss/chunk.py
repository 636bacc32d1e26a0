"""One chunk on one rank: its logits, the statistics they leave, and their gradient, in place."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.in_triton import triton_kernels
from megatron_burst.loss.call import Call
from megatron_burst.loss.products import LogitsGradient
from megatron_burst.loss.vocabulary import Targets


@dataclass(frozen=True, slots=True)
class Tokens:
    """A chunk's, [tokens] each but for the hidden states; gradients are 0 for what is ignored."""

    hidden: Tensor  # [tokens, d]
    lse: Tensor  # log-sum-exp of the whole vocabulary
    grad: Tensor  # of the loss
    entropy: Tensor | None = None
    grad_entropy: Tensor | None = None


def workspace(weight: Tensor, tokens: int, call: Call, *, slopes: bool) -> "InTriton | InTorch":
    """Make buffers for the logits of `tokens` and all rows of `weight`; slopes: for gradients.

    All chunks of a pass share them, so that one chunk of logits exists at a time. Products are made
    in the dtype of the weight, everything else in the dtype of sums.
    """
    kernels = triton_kernels(weight, "fused_loss")
    if kernels is not None:
        return InTriton(weight, tokens, call, kernels)
    return InTorch(weight, tokens, call, slopes=slopes)


class InTriton:
    """Logits in the dtype of the weight alone: 4 bytes of memory are moved a logit, or 6."""

    def __init__(self, weight: Tensor, tokens: int, call: Call, kernels: Any) -> None:
        self._weight, self._call, self._kernels = weight, call, kernels
        self._logits = weight.new_empty(tokens, weight.shape[0])
        self._bounds = call.logit_scale, call.logit_softcap or 0.0

    def statistics(self, hidden: Tensor, targets: Targets) -> tuple[Tensor, Tensor | None]:
        """See `InTorch`."""
        logits = torch.mm(hidden, self._weight.t(), out=self._logits[: len(hidden)])
        column = targets.column.masked_fill(~targets.mine, -1)
        statistics = logits.new_empty((self._call.statistics, len(hidden)), dtype=torch.float32)
        best = None if self._call.on_best is None else torch.empty_like(column)
        self._kernels.logit_statistics(
            statistics, best, logits, column, *self._bounds, entropy=self._call.entropy
        )
        return statistics, best

    def gradient(
        self, tokens: Tokens, targets: Targets, whole: int, highest: Tensor | None = None
    ) -> LogitsGradient:
        """See `InTorch`."""
        logits = self._logits[: len(tokens.hidden)]
        if highest is None:
            torch.mm(tokens.hidden, self._weight.t(), out=logits)
        column = targets.column.masked_fill(~targets.mine, -1)
        smoothing = self._call.label_smoothing
        weights = self._call.z_loss, smoothing, smoothing / whole
        given = tokens.lse, tokens.grad, tokens.entropy, tokens.grad_entropy
        self._kernels.logit_gradient(logits, *given, column, *self._bounds, *weights)
        return LogitsGradient(logits, logits)


class InTorch:
    """The reference, and what serves elsewhere."""

    def __init__(self, weight: Tensor, tokens: int, call: Call, *, slopes: bool) -> None:
        wide = accumulation_dtype(weight.dtype)
        shape = tokens, weight.shape[0]
        self._weight, self._call = weight, call
        self._narrow = weight.new_empty(shape)
        self._wide = self._narrow if wide == weight.dtype else weight.new_empty(shape, dtype=wide)
        slopes = slopes and call.logit_softcap is not None
        self._slopes = weight.new_empty(shape, dtype=wide) if slopes else None
        self._exponentials = weight.new_empty(shape, dtype=wide) if call.entropy else None

    def _logits(self, hidden: Tensor) -> Tensor:
        tokens = hidden.shape[0]
        logits = torch.mm(hidden, self._weight.t(), out=self._narrow[:tokens])
        if self._wide is not self._narrow:
            logits = self._wide[:tokens].copy_(logits)
        if self._call.logit_scale != 1.0:
            logits.mul_(self._call.logit_scale)
        if cap := self._call.logit_softcap:
            logits.div_(cap).tanh_()
            if self._slopes is not None:  # 1 - tanh²
                torch.square(logits, out=self._slopes[:tokens]).neg_().add_(1.0)
            logits.mul_(cap)
        return logits

    def statistics(self, hidden: Tensor, targets: Targets) -> tuple[Tensor, Tensor | None]:
        """Return [statistics, tokens], and if asked for, in which row the largest logits are.

        They are the largest logit, the sum of exp(logit - largest), the target's logit, 0 where the
        target is in no column, for the entropy the sum of exp(logit - largest) (logit - largest),
        and for label smoothing the sum of the logits.
        """
        logits = self._logits(hidden)
        best = None if self._call.on_best is None else logits.argmax(1)
        target = logits.gather(1, targets.column[:, None])[:, 0].mul_(targets.mine)
        sums = [logits.sum(1)] if self._call.label_smoothing else []
        highest = logits.amax(1)
        logits.sub_(highest[:, None])
        if self._exponentials is None:
            return torch.stack([highest, logits.exp_().sum(1), target, *sums]), best
        exponentials = torch.exp(logits, out=self._exponentials[: len(logits)])
        total, weighted = exponentials.sum(1), exponentials.mul_(logits).sum(1)
        return torch.stack([highest, total, target, weighted, *sums]), best

    def gradient(
        self, tokens: Tokens, targets: Targets, whole: int, highest: Tensor | None = None
    ) -> LogitsGradient:
        """Return the gradient of the unscaled, uncapped logits.

        `targets` are those of the tokens among these rows; the whole vocabulary has `whole`. Where
        `statistics` was called last, for these tokens, what it made serves, with the largest logits
        that it found; else logits are made again.
        """
        hidden, lse = tokens.hidden, tokens.lse
        grad = tokens.grad * self._call.logit_scale
        smoothing, z_loss = self._call.label_smoothing, self._call.z_loss
        factor = grad * (1.0 + 2.0 * z_loss * lse) if z_loss else grad
        if highest is not None:  # they are exp(logit - highest)
            probabilities, factor = self._wide[: len(hidden)], factor * (highest - lse).exp()
            probabilities.mul_(factor[:, None])
        else:
            logarithms = self._logits(hidden).sub_(lse[:, None])
            probabilities = self._times_exponentials(logarithms, factor, tokens)
        if smoothing:
            probabilities.sub_((grad * (smoothing / whole))[:, None])
        hit = grad * (smoothing - 1.0) * targets.mine
        probabilities.scatter_add_(1, targets.column[:, None], hit[:, None])
        if self._slopes is not None:
            probabilities.mul_(self._slopes[: len(probabilities)])
        narrow = probabilities
        if self._wide is not self._narrow:
            narrow = self._narrow[: len(probabilities)].copy_(probabilities)
        return LogitsGradient(narrow, probabilities)

    def _times_exponentials(self, logarithms: Tensor, factor: Tensor, tokens: Tokens) -> Tensor:
        """Return p factor - p (log p + entropy) grad_entropy, in place, from log p."""
        if self._exponentials is None or tokens.entropy is None or tokens.grad_entropy is None:
            return logarithms.exp_().mul_(factor[:, None])
        exponentials = torch.exp(logarithms, out=self._exponentials[: len(logarithms)])
        grad = tokens.grad_entropy * self._call.logit_scale
        logarithms.mul_(-grad[:, None]).add_((factor - grad * tokens.entropy)[:, None])
        return logarithms.mul_(exponentials)
