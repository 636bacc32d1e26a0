"""FlashAttention-3 from the package flash_attn_3, for Hopper GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request
from megatron_burst.kernels.requirements import half_precision, head_sizes_to, on_gpu
from megatron_burst.plans.mask import Relation

# Before 3.0.0 signatures changed while the version stayed 3.0.0b1.
PACKAGE = Package("flash_attn_3", "flash_attn_interface", "3.0.0", "3.1")


class Flash3Kernel:
    """flash-attn 3: windows, soft caps, a deterministic backward and MLA's usual head sizes."""

    name = "flash3"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why flash-attn 3 cannot serve the request."""
        reasons = [
            *PACKAGE.reasons_against(),
            *on_gpu(request, 9, 9),
            *half_precision(request),
            *head_sizes_to(request, 256),
            *_head_size_reasons(request.head_dim, request.value_head_dim),
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
            softmax_scale=scale,
            causal=(left, right) == (None, 0),
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
            softcap=soft_cap or 0.0,
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
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=(left, right) == (None, 0),
            window_size_left=-1 if left is None else left,
            window_size_right=-1 if right is None else right,
            softcap=soft_cap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _head_size_reasons(key_size: int, value_size: int) -> list[str]:
    reasons = []
    of_mla = 128 < key_size <= 192 and 96 < value_size <= 128
    if key_size != value_size and not of_mla:
        reasons.append(
            f"head sizes of K and V differ ({key_size} and {value_size}), and are not 136 to 192 "
            "and 104 to 128"
        )
    if max(key_size, value_size) > 192 and torch.are_deterministic_algorithms_enabled():
        reasons.append("its backward is not deterministic for head sizes above 192")
    return reasons
