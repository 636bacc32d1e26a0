"""The slow kernel that every other one must equal: dense scores in float64, any device."""

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.packed import OneByOne
from megatron_burst.kernels.protocol import Gradients, KernelInput, Request


class ReferenceKernel(OneByOne):
    """Attention written out, in float64 whatever the dtype; memory grows with queries x keys."""

    name = "reference"

    def reasons_against(self, request: Request) -> list[str]:
        """Nothing stands against it but its speed."""
        return []

    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        scores_BHQK = _masked(_scores(tile), tile)
        lse_BHQ = scores_BHQK.logsumexp(-1)
        weights_BHQK = (scores_BHQK - lse_BHQ[..., None]).exp()
        out, dtype = _weighted_sum(weights_BHQK, _per_query_head(tile.v, tile.q)), tile.q.dtype
        return out.to(dtype), lse_BHQ.to(accumulation_dtype(dtype))

    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v = tile.qkv
        scores_BHQK = _scores(tile)
        weights_BHQK = (_masked(scores_BHQK, tile) - lse.double()[..., None]).exp()
        dweights_BHQK = torch.einsum("bqhd,bkhd->bhqk", dout.double(), _per_query_head(v, q))
        delta_BHQ = (dout.double() * out.double()).sum(-1).transpose(1, 2)
        dscores_BHQK = weights_BHQK * (dweights_BHQK - delta_BHQ[..., None]) * tile.scale
        if tile.soft_cap is not None:
            dscores_BHQK *= 1 - (scores_BHQK / tile.soft_cap).square()  # the derivative of tanh

        dq = _weighted_sum(dscores_BHQK, _per_query_head(k, q))
        dk = _weighted_sum(dscores_BHQK.mT, q.double())
        dv = _weighted_sum(weights_BHQK.mT, dout.double())
        return dq.to(q.dtype), _per_kv_head(dk, k), _per_kv_head(dv, v)


def _scores(tile: KernelInput) -> Tensor:
    q, k, cap = tile.q, tile.k, tile.soft_cap
    scores_BHQK = torch.einsum("bqhd,bkhd->bhqk", q.double(), _per_query_head(k, q)) * tile.scale
    return scores_BHQK if cap is None else cap * (scores_BHQK / cap).tanh()


def _masked(scores_BHQK: Tensor, tile: KernelInput) -> Tensor:
    queries, keys = scores_BHQK.shape[2:]
    visible_QK = torch.from_numpy(tile.band.visible(queries, keys)).to(scores_BHQK.device)
    return scores_BHQK.masked_fill(~visible_QK, float("-inf"))


def _weighted_sum(weights_BHQK: Tensor, values_BKHD: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkhd->bqhd", weights_BHQK, values_BKHD)


def _per_query_head(x_BKHD: Tensor, q: Tensor) -> Tensor:
    return x_BKHD.double().repeat_interleave(q.shape[2] // x_BKHD.shape[2], dim=2)


def _per_kv_head(grad_BKHD: Tensor, like: Tensor) -> Tensor:
    return grad_BKHD.unflatten(2, (like.shape[2], -1)).sum(3).to(like.dtype)
