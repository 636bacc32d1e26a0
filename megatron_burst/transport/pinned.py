"""Pinned pages of the host's memory, with which copies to and from a GPU do not wait for it."""

import torch
from torch import Tensor


def pinned_like(x: Tensor) -> Tensor:
    """Return an empty tensor of the shape and dtype of `x` there.

    Torch takes a power of two bytes for it: what is large and stays comes of `PinnedBuffers`.
    """
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the host without waiting for what the device has still to do."""
    if device.type == "cuda":
        x = pinned_like(x).copy_(x)  # `pin_memory()` is not known to fake tensors
    return x.to(device, non_blocking=True)
