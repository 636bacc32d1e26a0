"""Stand-ins for the package fla, whose kernels need a GPU: what Megatron trains GDN with."""

import importlib
from typing import Any

import torch
from torch import Tensor

from megatron_burst.cpu_platform.recurrence import causal_convolution, check_unused


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


def build_cp_context(**_: object) -> None:
    """Refuse fla's way over ranks, which Megatron's dev imports with the rest."""
    raise ValueError("fla passes states on a GPU alone: take --linear-cp-mode headwise")


def chunk_gated_delta_rule(*tensors: Tensor, **options: Any) -> Any:
    """Megatron's own in torch, in float32, which it has for --deterministic-mode."""
    megatrons = importlib.import_module("megatron.core.ssm.gated_delta_net")  # it imports ours
    return megatrons.torch_chunk_gated_delta_rule(*tensors, **options)
