"""Dense attention in float64 by autograd: what every path must equal. Shares no code with ours."""

from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    out: Tensor  # [B, S, H, dv]
    lse: Tensor  # [B, H, S]
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, visible: Tensor) -> Result:
    """Attention of a whole sequence where query i sees key j if visible[i, j]."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v_all)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return Result(out.detach(), scores.logsumexp(-1).detach(), dq, dk, dv)


def visible_pairs(tokens: int, causal: bool) -> Tensor:
    everything = torch.ones(tokens, tokens, dtype=torch.bool)
    return everything.tril() if causal else everything


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The Frobenius norm of the difference over that of what is expected."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-300)).item()
