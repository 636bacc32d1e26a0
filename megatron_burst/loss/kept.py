"""Gradients that a forward makes because it knows the tokens' weights, and whether they hold."""

import logging
import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.loss.products import WeightSum
from megatron_burst.loss.tokens import is_without_values

logger = logging.getLogger(__name__)

_ROUNDINGS = 4  # between the weights given and those that came, of one token
_PATIENCE = 3  # forwards that a kept one may outlast


@dataclass(slots=True, weakref_slot=True)
class Kept:
    """Gradients of sum(weights x losses), kept for a backward that brings the factor."""

    weights: Tensor  # [parts, tokens of a part]; 0 where no loss counts
    d_hidden: Tensor | None  # [tokens of a part, d]
    d_weight: Tensor | None  # [rows, d] in the dtype of sums
    is_given_up: bool = False

    def give_up(self) -> None:
        """Free the gradients; the backward makes its own."""
        self.d_hidden, self.d_weight, self.is_given_up = None, None, True

    def factor(self, grad: Tensor) -> float | None:
        """Return `grad / weights` [parts, tokens of a part] where that is one number, else None.

        To rounding; nor is it one that is not finite. The host waits for the device. Without values
        it is 1.
        """
        if is_without_values(grad):
            return 1.0
        weights, grad = self.weights.flatten(), grad.flatten()
        largest = weights.abs().argmax()
        top = weights.take(largest)
        factor = torch.where(top == 0, 1.0, grad.take(largest) / top)
        expected = factor * weights
        rounding = _ROUNDINGS * torch.finfo(grad.dtype).eps * expected.abs()
        is_one = ((grad - expected).abs() <= rounding).all()
        number = torch.where(is_one, factor, torch.nan).item()
        return number if math.isfinite(number) else None

    def times(
        self, factor: float, d_weight: WeightSum | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `hidden` and of the weight, once: they are scaled in place."""
        d_hidden, total = self.d_hidden, self.d_weight
        self.give_up()  # a further backward finds it, too
        if d_hidden is not None and factor != 1.0:
            d_hidden.mul_(factor)
        if d_weight is None or total is None:
            return d_hidden, None
        d_weight.add(total, factor)
        return d_hidden, d_weight.result()


class Keeper:
    """Lets the calls of one model keep gradients of one forward at a time, while they hold.

    By what was called alone, never by what is freed when: ranks that share the vocabulary have to
    keep in the same calls.
    """

    def __init__(self) -> None:
        self._kept: weakref.ref[Kept] | None = None  # None: its backward came
        self._passed = 0  # forwards since
        self._wrong = 0  # in a row

    def takes(self) -> bool:
        """Whether the forward that begins may keep its gradients.

        One whose backward has not come for a few forwards has lost them: perhaps none will.
        """
        if self._wrong >= 3:
            return False
        if self._kept is not None and self._passed < _PATIENCE:
            self._passed += 1
            return False
        if self._kept is not None and (kept := self._kept()) is not None:
            kept.give_up()
        self._kept = None
        return True

    def keep(self, kept: Kept) -> None:
        """Be taken until its backward."""
        self._kept, self._passed = weakref.ref(kept), 0

    def factor(self, kept: Kept, grad: Tensor) -> float | None:
        """Return `kept.factor(grad)` at its backward; after three without one no more are kept."""
        if kept.is_given_up:
            return None
        self._kept, factor = None, kept.factor(grad)
        if factor is None:
            kept.give_up()
        self._wrong = 0 if factor is not None else self._wrong + 1
        if self._wrong == 3:
            logger.warning(
                "the losses' gradients are no multiple of the loss mask: from now on logits are "
                "made twice, forward and backward"
            )
        return factor or None  # of gradients that are all 0 nothing is computed
