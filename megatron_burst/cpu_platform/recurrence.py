"""What Mamba-2 computes over time, and convolutions, in plain torch.

Source: the duality of recurrence and attention, arXiv 2405.21060. Clear before fast: a chunk of
tokens is a few products of matrices.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def decaying_memory(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, chunk: int) -> Tensor:
    """Write to and read from a memory that decays with every token.

    Equals this loop for every batch and head, with the memory S [dk, dv] zero at first:

        S = exp(log_decay[t]) * S + outer(k[t], v[t])
        out[t] = q[t] @ S

    Args:
        q: [B, T, H, dk], like k.
        k: what a token writes under.
        v: [B, T, H, dv].
        log_decay: [B, T, H], not above 0.
        chunk: tokens that are computed together; the result depends on it by rounding alone.

    Returns:
        [B, T, H, dv]; computed in float32, in float64 if anything given is.
    """
    given = q, k, v, log_decay
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in given), torch.float32)
    memory = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    by_head = (tensor.to(dtype).transpose(1, 2) for tensor in given)
    out = []
    for part in zip(*(tensor.split(chunk, 2) for tensor in by_head), strict=True):
        read, memory = _one_chunk(memory, *part)
        out.append(read)
    return torch.cat(out, 2).transpose(1, 2)


def _one_chunk(
    memory: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor
) -> tuple[Tensor, Tensor]:
    """What the tokens of a chunk read, and the memory after them. All are [B, H, T, ...]."""
    decay = log_decay.cumsum(-1)
    since_start = decay.exp().unsqueeze(-1)
    tokens = torch.arange(decay.shape[-1])
    later = tokens > tokens.unsqueeze(-1)
    # What is left at token t (rows) of what token i (columns) wrote. Masked before exp, which would
    # overflow there: infinity times 0 has no gradient.
    left = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    read = since_start * (q @ memory) + (left * (q @ k.mT)) @ v
    return read, since_start[:, :, -1:] * memory + (left[:, :, -1].unsqueeze(-1) * k).mT @ v


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
