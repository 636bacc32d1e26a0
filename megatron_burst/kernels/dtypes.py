"""The rules about precision: sums in float32 or better, and what torch.autocast changes."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of `dtype` values: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of one device in the dtype that torch.autocast gives products, if it is on.

    As it does, it leaves float64 alone, and what is no floating-point number.
    """
    device = tensors[0].device.type
    if not _is_autocast(device):
        return tensors
    dtype, alone = torch.get_autocast_dtype(device), torch.float64
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != alone else x for x in tensors)


def without_autocast[**P, R](run: Callable[P, R]) -> Callable[P, R]:
    """Let a forward or backward compute in the dtypes of its tensors, wherever it is called."""

    @wraps(run)
    def as_they_are(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next(x.device.type for x in args if isinstance(x, Tensor))
        if not _is_autocast(device):
            return run(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return run(*args, **kwargs)

    return as_they_are


def _is_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
