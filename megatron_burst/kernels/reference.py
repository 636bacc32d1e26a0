"""The slow kernel that every other one must equal: dense scores in float64, any device."""

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Request
from megatron_burst.plans.mask import Relation


class ReferenceKernel:
    """Attention written out, in float64 whatever the dtype; memory grows with queries x keys."""

    name = "reference"

    def reasons_against(self, request: Request) -> list[str]:
        """Nothing stands against it but its speed."""
        return []

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        relation: Relation,
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        scores_BHQK = _masked(_scores(q, k, scale, soft_cap), relation)
        lse_BHQ = scores_BHQK.logsumexp(-1)
        weights_BHQK = (scores_BHQK - lse_BHQ[..., None]).exp()
        out = _weighted_sum(weights_BHQK, _per_query_head(v, q))
        return out.to(q.dtype), lse_BHQ.to(torch.promote_types(q.dtype, torch.float32))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        relation: Relation,
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); see `Kernel`."""
        scores_BHQK = _scores(q, k, scale, soft_cap)
        weights_BHQK = (_masked(scores_BHQK, relation) - lse.double()[..., None]).exp()
        dweights_BHQK = torch.einsum("bqhd,bkhd->bhqk", dout.double(), _per_query_head(v, q))
        delta_BHQ = (dout.double() * out.double()).sum(-1).transpose(1, 2)
        dscores_BHQK = weights_BHQK * (dweights_BHQK - delta_BHQ[..., None]) * scale
        if soft_cap is not None:
            dscores_BHQK *= 1 - (scores_BHQK / soft_cap).square()  # the derivative of tanh

        dq = _weighted_sum(dscores_BHQK, _per_query_head(k, q))
        dk = _weighted_sum(dscores_BHQK.mT, q.double())
        dv = _weighted_sum(weights_BHQK.mT, dout.double())
        return dq.to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v)


def _scores(q: Tensor, k: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    scores_BHQK = torch.einsum("bqhd,bkhd->bhqk", q.double(), _per_query_head(k, q)) * scale
    return scores_BHQK if soft_cap is None else soft_cap * (scores_BHQK / soft_cap).tanh()


def _masked(scores_BHQK: Tensor, relation: Relation) -> Tensor:
    queries, keys = scores_BHQK.shape[2:]
    visible_QK = relation.visible(queries, keys, scores_BHQK.device)
    return scores_BHQK.masked_fill(~visible_QK, float("-inf"))


def _weighted_sum(weights_BHQK: Tensor, values_BKHD: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", weights_BHQK, values_BKHD)


def _per_query_head(x_BKHD: Tensor, q: Tensor) -> Tensor:
    """Repeat each kv head for the query heads that read it."""
    return x_BKHD.double().repeat_interleave(q.shape[2] // x_BKHD.shape[2], dim=2)


def _per_kv_head(grad_BKHD: Tensor, like: Tensor) -> Tensor:
    """Sum over the query heads that read the same kv head."""
    batch, tokens, kv_heads, dim = like.shape
    return grad_BKHD.view(batch, tokens, kv_heads, -1, dim).sum(3).to(like.dtype)
