"""ATen's flash attention for CPUs: returns the log-sum-exp and has a backward of its own."""

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Request
from megatron_burst.mask import Relation


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
        if request.head_dim != request.value_head_dim:
            reasons.append(
                f"head sizes of K and V differ ({request.head_dim} and {request.value_head_dim})"
            )
        return reasons

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        out_BHSD, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_to_BHSD(q, k, v), 0.0, relation is Relation.CAUSAL, scale=scale
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); see `Kernel`."""
        grads_BHSD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_to_BHSD(dout, q, k, v, out), lse, 0.0, relation is Relation.CAUSAL, scale=scale
        )
        dq, dk, dv = _to_BHSD(*grads_BHSD)  # the same swap of axes leads back
        return dq, dk, dv


def _to_BHSD(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]
