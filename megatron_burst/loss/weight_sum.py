"""Where the gradient of the weight is summed: in the dtype of sums, chunk by chunk."""

from typing import Protocol

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.loss.products import LogitsGradient, add_product


class WeightSum(Protocol):
    """A place for dW [rows, d]; what a framework has beside `.grad` implements it, too."""

    apart: bool
    """Whether the sum lies in memory that is not the gradient's own."""

    def add_product(self, gradient: LogitsGradient, hidden: Tensor) -> None:
        """Add `gradient.T @ hidden` [rows, d] of a chunk's tokens."""

    def result(self) -> Tensor:
        """Return what autograd gets as the gradient of the weight."""


class OwnSum:
    """Sums in a tensor of its own, which becomes the gradient of the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._total: Tensor | None = None
        self.apart = accumulation_dtype(weight.dtype) != weight.dtype

    def add_product(self, gradient: LogitsGradient, hidden: Tensor) -> None:
        """Add `gradient.T @ hidden`."""
        add_product(self.total, gradient, hidden)

    def result(self) -> Tensor:
        """Return the sum, rounded once to the dtype of the weight."""
        return self.total.to(self._weight.dtype)

    @property
    def used(self) -> bool:
        """Whether anything was added."""
        return self._total is not None

    @property
    def total(self) -> Tensor:
        """The sum so far."""
        if self._total is None:
            self._total = torch.zeros_like(
                self._weight, dtype=accumulation_dtype(self._weight.dtype)
            )
        return self._total
