"""One chunk on one rank: its logits, the statistics they leave, and their gradient, in place."""

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.loss.call import Call
from megatron_burst.loss.products import LogitsGradient
from megatron_burst.loss.vocabulary import Targets


class Workspace:
    """The buffers that all chunks of a pass share, so that one chunk of logits exists at a time.

    Products are made in the dtype of the weight, everything else in the dtype of sums.
    """

    def __init__(self, weight: Tensor, tokens: int, call: Call, *, slopes: bool) -> None:
        """Make buffers for the logits of `tokens` and all rows of `weight`."""
        wide = accumulation_dtype(weight.dtype)
        shape = tokens, weight.shape[0]
        self._call = call
        self._narrow = weight.new_empty(shape)
        self._wide = self._narrow if wide == weight.dtype else weight.new_empty(shape, dtype=wide)
        slopes = slopes and call.logit_softcap is not None
        self._slopes = weight.new_empty(shape, dtype=wide) if slopes else None

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return scaled and capped logits [tokens, rows] in the dtype of sums."""
        tokens = hidden.shape[0]
        logits = torch.mm(hidden, weight.t(), out=self._narrow[:tokens])
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

    def statistics(self, logits: Tensor, targets: Targets) -> Tensor:
        """Return [statistics, tokens]; overwrites `logits`.

        They are the largest logit, the sum of exp(logit - largest), the target's logit, 0 where the
        target is in no column, and for label smoothing the sum of the logits.
        """
        target = logits.gather(1, targets.column[:, None])[:, 0].mul_(targets.mine)
        sums = [logits.sum(1)] if self._call.label_smoothing else []
        highest = logits.amax(1)
        logits.sub_(highest[:, None]).exp_()
        return torch.stack([highest, logits.sum(1), target, *sums])

    def gradient(
        self,
        probabilities: Tensor,
        lse: Tensor,
        targets: Targets,
        grad: Tensor,
        vocabulary: int,
    ) -> LogitsGradient:
        """Return the gradient of the unscaled, uncapped logits.

        Args:
            probabilities: [tokens, rows], overwritten.
            lse: [tokens], of the whole vocabulary.
            targets: of these tokens among these rows.
            grad: [tokens], the gradient of the losses; 0 for what is ignored.
            vocabulary: rows of the whole vocabulary.
        """
        grad = grad * self._call.logit_scale
        smoothing, z_loss = self._call.label_smoothing, self._call.z_loss
        factor = grad * (1.0 + 2.0 * z_loss * lse) if z_loss else grad
        probabilities.mul_(factor[:, None])
        if smoothing:
            probabilities.sub_((grad * (smoothing / vocabulary))[:, None])
        hit = grad * (smoothing - 1.0) * targets.mine
        probabilities.scatter_add_(1, targets.column[:, None], hit[:, None])
        if self._slopes is not None:
            probabilities.mul_(self._slopes[: len(probabilities)])
        narrow = probabilities
        if self._wide is not self._narrow:
            narrow = self._narrow[: len(probabilities)].copy_(probabilities)
        return LogitsGradient(narrow, probabilities)
