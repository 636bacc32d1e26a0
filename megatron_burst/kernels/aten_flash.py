"""The FlashAttention-2 that is compiled into torch, for NVIDIA GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Request
from megatron_burst.mask import Relation


class AtenFlashKernel:
    """FlashAttention-2 through ATen; needs no package beside torch."""

    name = "aten_flash"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why torch's FlashAttention cannot serve the request."""
        reasons = []
        if request.device.type != "cuda":
            reasons.append(f"the tensors are on {request.device.type}")
        elif not torch.backends.cuda.is_flash_attention_available():
            reasons.append("this torch was built without FlashAttention")
        elif torch.cuda.get_device_capability(request.device) < (8, 0):
            reasons.append("the GPU is older than compute capability 8.0")
        if request.dtype not in (torch.bfloat16, torch.float16):
            reasons.append(f"the dtype is {request.dtype}, not bfloat16 or float16")
        if request.head_dim != request.value_head_dim:
            reasons.append(
                f"head sizes of K and V differ ({request.head_dim} and {request.value_head_dim})"
            )
        if request.head_dim % 8 or request.head_dim > 256:
            reasons.append(f"head size {request.head_dim} is not a multiple of 8 up to 256")
        if request.soft_cap is not None:
            reasons.append("it has no soft cap")
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
