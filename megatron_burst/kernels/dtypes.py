"""The one rule about precision: sums over tiles and ranks are kept in float32 or better."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of `dtype` values: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
