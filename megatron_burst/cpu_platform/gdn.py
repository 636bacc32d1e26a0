"""Stand-ins for the package fla, whose kernels need a GPU: what Megatron trains GDN with."""

import torch
from torch import Tensor

from megatron_burst.cpu_platform.recurrence import causal_convolution, check_unused, decaying_memory

CHUNK = 64


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **unused: object
) -> tuple[Tensor, None]:
    """`causal_convolution`, and no state; ValueError if another option is given."""
    check_unused("causal_conv1d", unused)
    return causal_convolution(x, weight, bias, activation), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x * x) + eps), over the last axis."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **unused: object
) -> tuple[Tensor, None]:
    """The gated delta rule: `decaying_memory(q, k, v, g, beta) / sqrt(dk)`, and no state.

    q, k, v are [batch, tokens, heads, dk or dv], k of length 1; g, not above 0, and beta, from 0 to
    1, [batch, tokens, heads]. Returns v's shape and dtype. ValueError if another option is given.
    """
    check_unused("chunk_gated_delta_rule", unused)
    out = decaying_memory(q, k, v, g, beta, chunk=CHUNK) * q.shape[-1] ** -0.5
    return out.to(v.dtype), None
