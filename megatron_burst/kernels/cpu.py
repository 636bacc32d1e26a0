"""ATen's flash attention for CPUs: returns the log-sum-exp and has a backward of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.protocol import Request
from megatron_burst.kernels.requirements import no_soft_cap, one_head_size
from megatron_burst.plans.layout import Interval
from megatron_burst.plans.mask import Relation

_STRIPE_ROWS = 512  # of a banded tile; more rows mean fewer calls and more hidden pairs computed


class CpuKernel:
    """Flash attention in torch's own CPU code; takes grouped kv heads without repeating them."""

    name = "cpu"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why ATen's CPU kernel cannot serve the request."""
        reasons = []
        if request.device.type != "cpu":
            reasons.append(f"the tensors are on {request.device.type}")
        if request.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"the dtype is {request.dtype}")
        return [*reasons, *one_head_size(request), *no_soft_cap(request)]

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
        assert soft_cap is None
        if relation.is_banded(q.shape[1], k.shape[1]):
            return self._banded_forward(q, k, v, relation, scale)
        out_BHSD, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_to_BHSD(q, k, v), 0.0, relation == Relation.CAUSAL, scale=scale
        )
        return out_BHSD.transpose(1, 2), lse_BHS

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
        assert soft_cap is None
        if relation.is_banded(q.shape[1], k.shape[1]):
            return self._banded_backward(dout, q, k, v, out, lse, relation, scale)
        grads_BHSD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_to_BHSD(dout, q, k, v, out), lse, 0.0, relation == Relation.CAUSAL, scale=scale
        )
        dq, dk, dv = _to_BHSD(*grads_BHSD)  # the same swap of axes leads back
        return dq, dk, dv

    def _banded_forward(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float
    ) -> tuple[Tensor, Tensor]:
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_to_BHSD(q[:, rows.rows], k[:, keys.rows], v[:, keys.rows]),
                0.0,
                False,
                attn_mask=mask,
                scale=scale,
            )
            for rows, keys, mask in _stripes(q, k, relation)
        ]
        out_BHSD, lse_BHS = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        return out_BHSD.transpose(1, 2), lse_BHS

    def _banded_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        relation: Relation,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulation_dtype(q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        for rows, keys, mask in _stripes(q, k, relation):
            tensors = dout[:, rows.rows], q[:, rows.rows], k[:, keys.rows], v[:, keys.rows]
            grads_BHSD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_to_BHSD(*tensors, out[:, rows.rows]),
                lse[:, :, rows.rows],
                0.0,
                False,
                attn_mask=mask,
                scale=scale,
            )
            part_q, part_k, part_v = _to_BHSD(*grads_BHSD)
            dq[:, rows.rows] = part_q
            dk[:, keys.rows] += part_k
            dv[:, keys.rows] += part_v
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _stripes(
    q: Tensor, k: Tensor, relation: Relation
) -> Iterator[tuple[Interval, Interval, Tensor | None]]:
    """Cut a banded tile into rows with the keys they see and a mask, because the kernel knows none.

    A mask is as large as a stripe, not as the tile.
    """
    queries, every_key = q.shape[1], Interval(0, k.shape[1])
    for start in range(0, queries, _STRIPE_ROWS):
        found = relation.cut(Interval(start, min(start + _STRIPE_ROWS, queries)), every_key)
        assert found  # every query of a tile sees a key
        rows, keys, band = found
        mask = None
        if band != Relation.FULL:
            visible = band.visible(rows.length, keys.length)
            mask = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -torch.inf)
        yield rows, keys, mask


def _to_BHSD(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]
