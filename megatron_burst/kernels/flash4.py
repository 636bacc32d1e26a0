"""FlashAttention-4 from the package flash-attn-4, for Hopper and Blackwell GPUs."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.packed import InSequences, flash_settings
from megatron_burst.kernels.protocol import Gradients, KernelInput, Request
from megatron_burst.kernels.requirements import DeclaredKernel

PACKAGE = Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b34", "4.1")
_MLA = (192, 128)


class Flash4Kernel(InSequences, DeclaredKernel):
    """flash-attn 4: windows, soft caps, a deterministic backward and MLA's usual head sizes."""

    name = "flash4"
    package = PACKAGE
    gpus = (9, 11)
    one_head_size = False
    has_soft_cap = True

    def _more_reasons(self, request: Request) -> Iterator[str]:
        k, v = sizes = request.head_dim, request.value_head_dim
        if k != v and sizes != _MLA:
            yield f"head sizes of K and V differ ({k} and {v}), and are not {_MLA[0]} and {_MLA[1]}"
        if _is_hopper(request.device):
            if k != v and request.query_heads != request.kv_heads:
                yield "its backward of grouped heads has one head size on this GPU"
            return
        if max(sizes) > 128 and sizes not in (_MLA, (256, 256)):
            yield f"head sizes {k} and {v} are not up to 128 on this GPU"
        for is_asked, what in (
            (request.soft_cap is not None, "soft cap"),
            (request.is_banded, "backward with windows"),
        ):
            if sizes == (256, 256) and is_asked:
                yield f"it has no {what} for head size 256 on this GPU"

    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        out, lse, *_ = PACKAGE.functions()._flash_attn_fwd(
            *tile.qkv,
            causal=tile.is_causal,
            score_mod=_capped(tile.soft_cap)[0],
            return_lse=True,
            **flash_settings(tile),
        )
        return out, lse

    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        scores, of_gradient = _capped(tile.soft_cap)
        dq, dk, dv, *_ = PACKAGE.functions()._flash_attn_bwd(
            *(*tile.qkv, out, dout, lse),
            causal=tile.is_causal,
            score_mod=scores,
            score_mod_bwd=of_gradient,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **flash_settings(tile),
        )
        return dq, dk, dv


@cache
def _capped(soft_cap: float | None) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return what caps scores and their gradients, as `softcap` has it made.

    That makes it anew in every call, and finds the compiled kernel by a hash of its source.
    """
    if not soft_cap:
        return None, None
    utils = PACKAGE.functions().utils
    return utils.create_softcap_scoremod(soft_cap), utils.create_softcap_scoremod_bwd(soft_cap)


def _is_hopper(device: torch.device) -> bool:
    on_gpu = device.type == "cuda" and torch.version.cuda is not None
    return on_gpu and torch.cuda.get_device_capability(device)[0] == 9
