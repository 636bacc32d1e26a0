"""Where dW is summed, and how narrow products get into a wide sum without being rounded."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogitsGradient:
    """The gradient of a chunk's logits [tokens, rows]; one tensor where there is no wide one."""

    narrow: Tensor  # in the dtype of the weight
    wide: Tensor  # in the dtype of sums, not rounded


class WeightSum(Protocol):
    """A place for dW [rows, d]; what a framework has beside `.grad` implements it, too."""

    apart: bool
    """Whether the sum lies in memory that is not the gradient's own."""
    kept_apart: bool
    """Whether one that the forward keeps does."""

    def add_product(self, gradient: LogitsGradient, hidden: Tensor) -> None:
        """Add `gradient.T @ hidden` [rows, d] of a chunk's tokens."""

    def add(self, total: Tensor, factor: float) -> None:
        """Add `factor * total`, a sum that the forward kept; `total` may be taken."""

    def add_rows(self, rows: slice, total: Tensor) -> None:
        """Add what is all of dW for some rows; all other rows come so, too."""

    def result(self) -> Tensor:
        """Return what autograd gets as the gradient of the weight."""


class OwnSum:
    """Sums in a tensor of its own, which becomes the gradient of the weight."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self._wide = weight, accumulation_dtype(weight.dtype)
        self.apart = self.kept_apart = self._wide != weight.dtype
        self.used = False
        self._rounded: Tensor | None = None  # of rows that came one block after the other

    @functools.cached_property
    def total(self) -> Tensor:
        """The sum so far."""
        self.used = True
        return torch.zeros_like(self._weight, dtype=self._wide)

    def add_product(self, gradient: LogitsGradient, hidden: Tensor) -> None:
        """Add `gradient.T @ hidden`."""
        add_product(self.total, gradient, hidden)

    def add(self, total: Tensor, factor: float) -> None:
        """Take `factor * total`."""
        self.total = total if factor == 1.0 else total.mul_(factor)

    def add_rows(self, rows: slice, total: Tensor) -> None:
        """Round and take the sum of some rows."""
        if self._rounded is None:
            self._rounded = torch.empty_like(self._weight)
        self._rounded[rows] = total

    def result(self) -> Tensor:
        """Return the sum, rounded once to the dtype of the weight."""
        return self.total.to(self._weight.dtype) if self._rounded is None else self._rounded


def add_product(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    """Do `total += gradient.T @ hidden` where total [rows, d] is in the dtype of sums."""
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.narrow.t(), hidden)
    elif total.device.type == "cpu":
        total.addmm_(gradient.wide.t().to(total.dtype), hidden.to(total.dtype))
    else:
        best_way(total.device, hidden.dtype, total.dtype)(total, gradient, hidden)


def _sum_in_place(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    torch.addmm(total, gradient.narrow.t(), hidden, out_dtype=total.dtype, out=total)


def _wide_parts(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    _in_parts(total, gradient, hidden, total.dtype, out_dtype=total.dtype)


def rounded_parts(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    """Do it with products in the narrow dtype: each chunk's is rounded, their sum is not."""
    _in_parts(total, gradient, hidden, hidden.dtype)


def _in_parts(
    total: Tensor, gradient: LogitsGradient, hidden: Tensor, dtype: torch.dtype, **options: Any
) -> None:
    """Add products of as many rows at a time as the chunk has tokens.

    So no second tensor of the size of dW is needed, but one as large as the hidden states, widened.
    """
    scratch = torch.empty_like(hidden, dtype=dtype)
    for start in range(0, total.shape[0], len(hidden)):
        columns = gradient.narrow[:, start : start + len(hidden)]
        part = torch.mm(columns.t(), hidden, out=scratch[: columns.shape[1]], **options)
        total[start : start + len(hidden)].add_(part)


@functools.cache
def best_way(
    device: torch.device, narrow: torch.dtype, wide: torch.dtype
) -> Callable[[Tensor, LogitsGradient, Tensor], None]:
    """Return the first way that this torch has on the device; the last one rounds, which is logged.

    torch documents products of narrow tensors with a wide result for CUDA from 2.8 on; whether they
    can be added in place differs by version. So they are tried, once.
    """
    ones = torch.ones(16, 16, device=device, dtype=narrow)
    for way in _sum_in_place, _wide_parts:
        total = torch.ones(16, 16, device=device, dtype=wide)
        try:
            way(total, LogitsGradient(ones, torch.ones_like(total)), ones)
        except (RuntimeError, TypeError) as reason:  # TypeError: an older torch
            logger.debug("%s: %s", way.__name__, reason)
            continue
        if (total == 17).all():
            return way
    logger.warning(
        "linear_cross_entropy: torch %s has no product of %s into %s on %s; each chunk's part of "
        "dW is rounded before it is added",
        *(torch.__version__, narrow, wide, device.type),
    )
    return rounded_parts
