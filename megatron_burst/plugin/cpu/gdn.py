"""Stand-ins for the package fla, whose kernels need a GPU: what Megatron trains GDN with."""

import torch
from torch import Tensor

from megatron_burst.plugin.cpu.recurrence import causal_convolution, check_unused, decaying_memory

CHUNK = 64


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, None]:
    """`causal_convolution`, and no state; ValueError if one of the last three is given."""
    check_unused(
        "causal_conv1d",
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return causal_convolution(x, weight, bias, activation), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x * x) + eps), over the last axis."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, None]:
    """The gated delta rule.

    For every batch and head, with the state S [dk, dv] zero at first:

        S = exp(g[t]) * S
        S = S + outer(k[t], beta[t] * (v[t] - k[t] @ S))
        out[t] = q[t] @ S / sqrt(dk)

    Args:
        q: [batch, tokens, heads, dk].
        k: [batch, tokens, heads, dk], of length 1.
        v: [batch, tokens, heads, dv].
        g: [batch, tokens, heads], not above 0.
        beta: [batch, tokens, heads], from 0 to 1.
        initial_state: None; ValueError if this or one of the others is given.
        output_final_state: False.
        use_qk_l2norm_in_kernel: False.
        cu_seqlens: None.

    Returns:
        [batch, tokens, heads, dv] in v's dtype, computed in float32, in float64 for float64; None.
    """
    check_unused(
        "chunk_gated_delta_rule",
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )
    out = decaying_memory(q, k, v, g, beta, chunk=CHUNK) * q.shape[-1] ** -0.5
    return out.to(v.dtype), None
