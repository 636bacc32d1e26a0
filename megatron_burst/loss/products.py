"""How the product of two narrow tensors gets into a wide sum without being rounded on the way."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LogitsGradient:
    """The gradient of a chunk's logits [tokens, rows]; one tensor where the dtypes are one."""

    narrow: Tensor  # in the dtype of the weight
    wide: Tensor  # in the dtype of sums, not rounded; memory to use when it is not needed more


def add_product(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    """Do `total += gradient.T @ hidden` where total [rows, d] is in the dtype of sums."""
    if total.dtype == hidden.dtype:
        total.addmm_(gradient.narrow.t(), hidden)
    elif total.device.type == "cpu":
        total.addmm_(gradient.wide.t(), hidden.to(total.dtype))
    else:
        best_way(total.device, hidden.dtype, total.dtype)(total, gradient, hidden)


def _sum_in_place(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    torch.addmm(total, gradient.narrow.t(), hidden, out_dtype=total.dtype, out=total)


def _wide_parts(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out_dtype=out.dtype, out=out)

    _in_parts(total, gradient, hidden, total.dtype, multiply)


def rounded_parts(total: Tensor, gradient: LogitsGradient, hidden: Tensor) -> None:
    """Do it with products in the narrow dtype: each chunk's is rounded, their sum is not."""

    def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
        torch.mm(a, b, out=out)

    _in_parts(total, gradient, hidden, hidden.dtype, multiply)


def _in_parts(
    total: Tensor,
    gradient: LogitsGradient,
    hidden: Tensor,
    dtype: torch.dtype,
    multiply: Callable[[Tensor, Tensor, Tensor], None],
) -> None:
    """Add products of as many rows at a time as the memory of the wide gradient holds.

    So no second tensor of the size of dW is needed.
    """
    width = hidden.shape[1]
    scratch = gradient.wide.flatten().view(dtype)
    at_a_time = scratch.numel() // width
    if at_a_time == 0:
        scratch, at_a_time = scratch.new_empty(width), 1
    for start in range(0, total.shape[0], at_a_time):
        columns = gradient.narrow[:, start : start + at_a_time]
        part = scratch[: columns.shape[1] * width].view(columns.shape[1], width)
        multiply(columns.t(), hidden, part)
        total[start : start + at_a_time].add_(part)


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
