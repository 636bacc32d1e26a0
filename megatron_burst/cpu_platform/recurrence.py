"""Convolutions in plain torch, and what stand-ins for kernels refuse."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolve every channel with its own weights over the last tokens, then SiLU.

    With x zero before the first token:

        out[t] = silu(bias + sum(weight[:, j] * x[t + 1 + j - width] for j in range(width)))

    Args:
        x: [B, T, channels].
        weight: [channels, width].
        bias: [channels], or None.
        activation: "silu", or "swish", its other name; ValueError for another.
    """
    if activation not in ("silu", "swish"):
        raise ValueError(f"the convolution on the CPU platform has silu, not {activation!r}")
    channels, width = weight.shape
    out = F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=width - 1, groups=channels)
    return F.silu(out[..., : x.shape[1]].mT)


def check_unused(function: str, options: Mapping[str, object]) -> None:
    """ValueError for an option of a GPU's kernel that is given and would be ignored here."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{function} on the CPU platform is for training on whole sequences: it does not "
                f"take {name}"
            )
