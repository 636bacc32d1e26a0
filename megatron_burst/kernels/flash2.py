"""FlashAttention-2 from the package flash-attn, for NVIDIA GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request
from megatron_burst.kernels.requirements import (
    half_precision,
    head_sizes_to,
    on_gpu,
    one_head_size,
)
from megatron_burst.plans.mask import Relation

# The signatures are those of 2.7.0 and later; Blackwell was refused before 2.7.4.
PACKAGE = Package("flash-attn", "flash_attn.flash_attn_interface", "2.7.4", "2.9")


class Flash2Kernel:
    """flash-attn 2: windows, soft caps and a deterministic backward."""

    name = "flash2"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why flash-attn 2 cannot serve the request."""
        reasons = [
            *PACKAGE.reasons_against(),
            *on_gpu(request, 8),
            *half_precision(request),
            *one_head_size(request),
            *head_sizes_to(request, 256),
        ]
        return reasons or PACKAGE.import_reasons()

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
        left, right = relation.window(q.shape[1], k.shape[1])
        out, lse, *_ = PACKAGE.functions()._flash_attn_forward(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=(left, right) == (None, 0),
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
            softcap=soft_cap or 0.0,
            alibi_slopes=None,
            return_softmax=False,
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
        left, right = relation.window(q.shape[1], k.shape[1])
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        PACKAGE.functions()._flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),  # the kernel ignores its strides
            dq,
            dk,
            dv,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=(left, right) == (None, 0),
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
            softcap=soft_cap or 0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
