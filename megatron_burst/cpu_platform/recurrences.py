"""Stand-ins for mamba_ssm and fla, whose kernels need a GPU: what Megatron trains with.

An option that is given and would be ignored here is a ValueError.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_burst.plugin.scans.recurrence import decaying_memory


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolve every channel with its own weights over the last tokens, then SiLU.

    With x zero before the first token:

        out[t] = silu(bias + sum(weight[:, j] * x[t + 1 + j - width] for j in range(width)))

    Args:
        x: [B, T, channels].
        weight: [channels, width].
        bias: [channels], or None.
        activation: "silu", or "swish", its other name.
    """
    if activation not in ("silu", "swish"):
        raise ValueError(f"the convolution on the CPU platform has silu, not {activation!r}")
    channels, width = weight.shape
    out = F.conv1d(x.mT, weight.unsqueeze(1), bias, padding=width - 1, groups=channels)
    return F.silu(out[..., : x.shape[1]].mT)


def _check_unused(function: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{function} on the CPU platform is for training on whole sequences: it does not "
                f"take {name}"
            )


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
    dt_softplus: bool,
    **unused: object,
) -> Tensor:
    """Mamba-2's selective state space.

    With softplus(dt + dt_bias) as dt, for every batch and head, B and C those of the head's group
    and the state S [n, p] zero at first; the last line where z is given:

        S = exp(dt[t] * A) * S + dt[t] * outer(B[t], x[t])
        y[t] = C[t] @ S + D * x[t]
        y[t] = y[t] * silu(z[t])

    x and z are [batch, tokens, heads, p], dt [batch, tokens, heads], B and C [batch, tokens,
    groups, n], D [heads] or [heads, p], A, below 0, and dt_bias [heads]. `chunk_size` tokens are
    computed together, in float32, in float64 for float64. Returns x's shape and dtype.
    """
    _check_unused("mamba_chunk_scan_combined", unused)
    dt = dt + dt_bias  # float32, as dt_bias is
    dt = F.softplus(dt) if dt_softplus else dt
    y, _ = decaying_memory(C, B, dt.unsqueeze(-1) * x, dt * A, chunk=chunk_size)
    y = y + D.reshape(x.shape[2], -1) * x
    return (y if z is None else y * F.silu(z.to(y.dtype))).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    activation: str,
    headdim: int | None,
    ngroups: int,
    **unused: object,
) -> Tensor:
    """Mamba-2 between its projections: convolution, state space and gate.

    Equals, the last axes cut into heads of p and groups of n:

        z, xBC, dt = split(zxbcdt)
        x, B, C = split(causal_convolution(xBC, conv1d_weight, conv1d_bias, activation))
        out = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias)

    zxbcdt is [batch, tokens, 2 * heads * p + 2 * groups * n + heads], the weight [heads * p + 2 *
    groups * n, width]; `headdim` is p, None where D tells it. Returns [batch, tokens, heads * p].
    """
    _check_unused("mamba_split_conv1d_scan_combined", unused)
    heads, channels = len(A), len(conv1d_weight)
    inner = heads * (headdim or D.shape[1])
    z, xBC, dt = zxbcdt.split([inner, channels, heads], -1)
    xBC = causal_convolution(xBC, conv1d_weight, conv1d_bias, activation)
    x, B, C = xBC.split([inner, *[(channels - inner) // 2] * 2], -1)
    x, z = (tensor.unflatten(-1, (heads, -1)) for tensor in (x, z))
    B, C = (tensor.unflatten(-1, (ngroups, -1)) for tensor in (B, C))
    y = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D=D, z=z, dt_bias=dt_bias, dt_softplus=True
    )
    return y.flatten(2)


class RMSNorm(nn.Module):
    """RMSNorm of groups of channels, behind a gate.

    With x = x * silu(z) where z is given, for every `group_size` channels of the last axis:

        out = x / sqrt(mean(x * x) + eps) * weight
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float,
        group_size: int,
        device: torch.device,
        dtype: torch.dtype,
        **unused: object,
    ) -> None:
        super().__init__()
        _check_unused("RMSNorm", unused)
        self.eps = eps
        self.group_size = group_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The norm of x [..., hidden_size], in its dtype."""
        gated = x if z is None else x * F.silu(z)
        groups = gated.unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), eps=self.eps)
        return normed.flatten(-2) * self.weight


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, **unused: object
) -> tuple[Tensor, None]:
    """`causal_convolution`, and no state."""
    _check_unused("causal_conv1d", unused)
    return causal_convolution(x, weight, bias, activation), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x * x) + eps), over the last axis."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    return (exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def build_cp_context(**_: object) -> None:
    """Refuse fla's way over ranks, which Megatron's dev imports with the rest."""
    raise ValueError("fla passes states on a GPU alone: take --linear-cp-mode headwise")


def chunk_gated_delta_rule(*tensors: Tensor, **options: Any) -> Any:
    """Megatron's own in torch, in float32, which it has for --deterministic-mode."""
    megatrons = importlib.import_module("megatron.core.ssm.gated_delta_net")  # it imports ours
    return megatrons.torch_chunk_gated_delta_rule(*tensors, **options)
