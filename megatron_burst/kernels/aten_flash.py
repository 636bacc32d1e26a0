"""The FlashAttention-2 that is compiled into torch, for NVIDIA GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Request
from megatron_burst.kernels.requirements import (
    half_precision,
    head_sizes_to,
    no_soft_cap,
    on_gpu,
    one_head_size,
)
from megatron_burst.plans.mask import Relation


class AtenFlashKernel:
    """FlashAttention-2 through ATen; needs no package beside torch.

    Its backward asks torch itself whether it has to be deterministic.
    """

    name = "aten_flash"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why torch's FlashAttention cannot serve the request."""
        reasons = [
            *on_gpu(request, 8),
            *half_precision(request),
            *one_head_size(request),
            *head_sizes_to(request, 256),
            *no_soft_cap(request),
        ]
        if not reasons and not torch.backends.cuda.is_flash_attention_available():
            reasons.append("this torch was built without FlashAttention")
        return reasons

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
        left, right = relation.window(q.shape[1], k.shape[1])
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            None,  # cumulative lengths of packed queries and keys
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            (left, right) == (None, 0),
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

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
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
        left, right = relation.window(q.shape[1], k.shape[1])
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),  # the kernel ignores its strides
            None,  # cumulative lengths of packed queries and keys
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            (left, right) == (None, 0),
            rng_state,
            rng_state.new_empty(()),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        return dq, dk, dv
