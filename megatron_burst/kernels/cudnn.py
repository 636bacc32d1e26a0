"""cuDNN's fused attention as torch ships it, for NVIDIA GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Request
from megatron_burst.kernels.requirements import (
    half_precision,
    head_sizes_to,
    no_soft_cap,
    on_gpu,
)
from megatron_burst.plans.mask import Relation

_OLDEST = 91501  # 9.15.1: before, rows of its results were wrong


class CudnnKernel:
    """cuDNN's flash attention through ATen; needs no package beside torch."""

    name = "cudnn"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why cuDNN cannot serve the request."""
        reasons = [
            *on_gpu(request, 8),
            *half_precision(request),
            *head_sizes_to(request, 128),
            *no_soft_cap(request),
        ]
        if torch.are_deterministic_algorithms_enabled():
            reasons.append("its backward is not deterministic, and deterministic mode is on")
        if request.is_banded:
            reasons.append("it is not asked for windows, and a tile's mask is a band")
        if request.has_documents:
            reasons.append("it plans every new shape for long, and documents bring new ones")
        if not reasons:
            reasons = _version_reasons()
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
        out_BHSD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_to_BHSD(q, k, v), None, True, 0.0, relation == Relation.CAUSAL, scale=scale
        )
        return out_BHSD.transpose(1, 2), lse.view(q.shape[0], q.shape[2], q.shape[1])

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
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is 0
        grads_BHSD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *_to_BHSD(dout, q, k, v, out),
            lse.contiguous()[..., None],
            seed,
            seed,
            None,  # attention bias
            None,  # cumulative lengths of packed queries and keys
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            relation == Relation.CAUSAL,
            scale=scale,
        )
        dq, dk, dv = _to_BHSD(*grads_BHSD)  # the same swap of axes leads back
        return dq, dk, dv


def _version_reasons() -> list[str]:
    if not torch.backends.cudnn.is_available():
        return ["this torch has no cuDNN"]
    version = torch.backends.cudnn.version() or 0
    if version >= _OLDEST:
        return []
    return [f"cuDNN {_dotted(version)} is older than {_dotted(_OLDEST)}"]


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _to_BHSD(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]
