"""FlashAttention-4 from the package flash-attn-4, for Hopper and Blackwell GPUs."""

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request
from megatron_burst.kernels.requirements import half_precision, head_sizes_to, on_gpu
from megatron_burst.plans.mask import Relation

PACKAGE = Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b27", "4.1")
_MLA = (192, 128)


class Flash4Kernel:
    """flash-attn 4: windows, soft caps, a deterministic backward and MLA's usual head sizes."""

    name = "flash4"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why flash-attn 4 cannot serve the request."""
        on_device = on_gpu(request, 9, 11)
        reasons = [
            *PACKAGE.reasons_against(),
            *on_device,
            *half_precision(request),
            *head_sizes_to(request, 256),
            *_head_size_reasons(request, is_hopper=not on_device and _is_hopper(request.device)),
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
        out, lse, *_ = PACKAGE.functions()._flash_attn_fwd(
            q,
            k,
            v,
            softmax_scale=scale,
            causal=(left, right) == (None, 0),
            softcap=soft_cap,
            window_size_left=left,
            window_size_right=right,
            return_lse=True,
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
        dq, dk, dv, *_ = PACKAGE.functions()._flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse.contiguous(),
            softmax_scale=scale,
            causal=(left, right) == (None, 0),
            softcap=soft_cap or 0.0,
            window_size_left=left,
            window_size_right=right,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _head_size_reasons(request: Request, *, is_hopper: bool) -> list[str]:
    sizes = request.head_dim, request.value_head_dim
    reasons = []
    if sizes[0] != sizes[1] and sizes != _MLA:
        reasons.append(
            "head sizes of K and V differ ({} and {}), and are not {} and {}".format(*sizes, *_MLA)
        )
    if not is_hopper and max(sizes) > 128 and sizes not in (_MLA, (256, 256)):
        reasons.append("head sizes {} and {} are not up to 128 on this GPU".format(*sizes))
    if not is_hopper and sizes == (256, 256) and request.soft_cap is not None:
        reasons.append("it has no soft cap for head size 256 on this GPU")
    return reasons
