"""Gradients that a forward makes because it knows the tokens' weights, and whether they hold."""

import logging
import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.loss.products import WeightSum

logger = logging.getLogger(__name__)

_ROUNDINGS = 4  # between the weights given and those that came, of one token


@dataclass(slots=True, weakref_slot=True)
class Kept:
    """Gradients of sum(weights x losses), kept for a backward that brings the factor."""

    weights: Tensor  # [parts, tokens of a part]; 0 where no loss counts
    d_hidden: Tensor | None  # [tokens of a part, d]
    d_weight: Tensor | None  # [rows, d] in the dtype of sums

    def factor(self, grad: Tensor) -> float | None:
        """Return `grad / weights` [parts, tokens of a part] where that is one number, else None.

        To rounding; nor is it one where it is 0 or not finite. The host waits for the device.
        """
        weights, grad = self.weights.flatten(), grad.flatten()
        largest = weights.abs().argmax()
        top = weights.take(largest)
        factor = torch.where(top == 0, 1.0, grad.take(largest) / top)
        expected = factor * weights
        rounding = _ROUNDINGS * torch.finfo(grad.dtype).eps * expected.abs()
        is_one = ((grad - expected).abs() <= rounding).all()
        found = torch.where(is_one, factor, torch.nan).item()
        return found if math.isfinite(found) and found else None

    def times(
        self, factor: float, d_weight: WeightSum | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of `hidden` and of the weight, once: they are scaled in place."""
        if self.d_hidden is not None and factor != 1.0:
            self.d_hidden.mul_(factor)
        if d_weight is None or self.d_weight is None:
            return self.d_hidden, None
        d_weight.add(self.d_weight, factor)
        return self.d_hidden, d_weight.result()


class Keeper:
    """Lets the calls of one model keep gradients of one forward at a time, while they hold."""

    def __init__(self) -> None:
        self._kept: weakref.ref[Kept] | None = None
        self._wrong = 0  # in a row

    @property
    def is_free(self) -> bool:
        """Whether a forward may keep its gradients."""
        return (self._kept is None or self._kept() is None) and self._wrong < 3

    def keep(self, kept: Kept) -> None:
        """Be taken while it exists."""
        self._kept = weakref.ref(kept)

    def found(self, *, right: bool) -> None:
        """Note whether the gradients held; after three that did not no more are kept."""
        self._wrong = 0 if right else self._wrong + 1
        if self._wrong == 3:
            logger.warning(
                "the losses' gradients are no multiple of the loss mask: from now on logits are "
                "made twice, forward and backward"
            )
