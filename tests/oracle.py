"""Dense attention in float64 by autograd: what every path must equal. Shares no code with ours."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    out: Tensor  # [B, S, H, dv]
    lse: Tensor  # [B, H, S]
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor = torch.zeros(0)  # [H], or nothing without a sink


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sink: Tensor | None = None,
) -> Result:
    """Attention of a whole sequence where query i sees key j if visible[i, j].

    A sink is written out as one more key, whose value is 0.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k_all)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    leaves = [q, k, v]
    if sink is not None:
        leaves.append(sink.detach().double().requires_grad_())
        column = leaves[3][:, None, None].expand(len(q), -1, q.shape[1], 1)
        scores = torch.cat([scores, column], -1)
        visible = torch.cat([visible, visible.new_ones(len(visible), 1)], -1)
        v_all = torch.cat([v_all, torch.zeros_like(v_all[:, :1])], 1)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.detach().logsumexp(-1)
    # Of a row that sees nothing softmax and its gradient are NaN; the row's output is 0.
    scores = scores.masked_fill(~visible.any(-1, keepdim=True), 0.0)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", weights, v_all)
    return Result(out.detach(), lse, *torch.autograd.grad(out, leaves, dout.double()))


def latent_attention(
    q: Tensor,
    latent: Tensor,
    rotary: Tensor,
    weight: Tensor,
    dout: Tensor,
    visible: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """The same where k and v are made of latents: out, dq, dlatent, drotary, dweight."""
    leaves = [x.detach().double().requires_grad_() for x in (latent, rotary, weight)]
    by_head = leaves[2].unflatten(0, (q.shape[2], -1))
    made = torch.einsum("bsr,hdr->bshd", leaves[0], by_head)
    content = q.shape[3] - rotary.shape[2]
    turned = leaves[1][:, :, None].expand(-1, -1, q.shape[2], -1)
    kv = torch.cat([made[..., :content], turned], -1), made[..., content:]
    found = attention(q, *kv, dout, visible, scale=scale)
    made_of = torch.autograd.grad(kv, leaves, (found.dk, found.dv))
    return found.out, found.dq, *made_of


def visible_pairs(
    tokens: int,
    causal: bool,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    table: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """The mask of a whole sequence as a matrix: visible[query, key]."""
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    visible = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        visible &= key <= query
    if window is not None:
        visible &= key >= query - window
    if documents is not None:
        number = torch.zeros(tokens, dtype=torch.long)
        for start in documents[1:-1]:
            number[start:] += 1
        visible &= number[:, None] == number
        if lengths is not None:
            starts = torch.tensor(documents)[number]
            real = torch.arange(tokens) < starts + torch.tensor(lengths)[number]
            visible &= real[:, None] & real
    if table is not None:
        size = tokens // len(table)
        visible &= table.repeat_interleave(size, 0).repeat_interleave(size, 1)
    return visible


def relative_error(found: Tensor, expected: Tensor, at_least: float = 1e-300) -> float:
    """The Frobenius norm of the difference over that of what is expected; -inf equals -inf.

    Infinite for NaN, which `max` would pass over.
    """
    blind = expected.isneginf()
    if not torch.equal(found.isneginf(), blind):
        return float("inf")
    found, expected = found.masked_fill(blind, 0.0), expected.masked_fill(blind, 0.0)
    difference = (found.double() - expected.double()).norm()
    error = difference / expected.double().norm().clamp_min(at_least)
    return error.nan_to_num(nan=torch.inf).item()
