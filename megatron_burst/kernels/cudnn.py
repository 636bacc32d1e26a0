"""cuDNN's fused attention as torch ships it, for NVIDIA GPUs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_burst.kernels.aten_flash import AtenFlashKernel
from megatron_burst.kernels.packed import OneByOne
from megatron_burst.kernels.padded import PaddedKernel
from megatron_burst.kernels.protocol import Gradients, Kernel, KernelInput, Request, swapped
from megatron_burst.kernels.requirements import DeclaredKernel

_OLDEST = 91501  # 9.15.1: before, rows of its results were wrong


class CudnnKernel(OneByOne, DeclaredKernel):
    """cuDNN's flash attention through ATen; needs no package beside torch.

    FlashAttention-2 computes the tiles that it refuses or gets wrong.
    """

    name = "cudnn"
    largest_head = 128
    one_head_size = False

    def _more_reasons(self, request: Request) -> Iterator[str]:
        if torch.are_deterministic_algorithms_enabled():
            yield "its backward is not deterministic, and deterministic mode is on"
        if request.is_banded:
            yield "it is not asked for windows, and a tile's mask is a band"
        if request.has_documents:
            yield "it plans every new shape for long, and documents bring new ones"

    def _late_reasons(self) -> list[str]:
        if not torch.backends.cudnn.is_available():
            return ["this torch has no cuDNN"]
        version = torch.backends.cudnn.version() or 0
        if version >= _OLDEST:
            return []
        return [f"cuDNN {_dotted(version)} is older than {_dotted(_OLDEST)}"]

    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        if _has_one_query(tile):
            return _instead(tile).forward(tile)
        out_BHSD, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *swapped(*tile.qkv), None, True, 0.0, tile.is_causal, scale=tile.scale
        )
        batch, tokens, heads, _ = tile.q.shape
        return out_BHSD.transpose(1, 2), lse.view(batch, heads, tokens)

    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        if _has_one_query(tile) or _has_half_a_block(tile):
            return _instead(tile).backward(tile, dout, out, lse)
        seed = torch.zeros((), dtype=torch.int64, device=tile.q.device)  # of dropout, which is 0
        grads_BHSD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *swapped(dout, *tile.qkv, out),
            lse.contiguous()[..., None],
            seed,
            seed,
            None,  # attention bias
            None,  # cumulative lengths of packed queries and keys
            None,
            tile.q.shape[1],
            tile.k.shape[1],
            0.0,
            tile.is_causal,
            scale=tile.scale,
        )
        dq, dk, dv = swapped(*grads_BHSD)
        return dq, dk, dv


def _has_one_query(tile: KernelInput) -> bool:
    """Whether 9.19 refuses it (one key) or returns NaN where lse < -88 (cudnn-frontend 1072)."""
    return tile.q.shape[1] == 1


def _has_half_a_block(tile: KernelInput) -> bool:
    """Whether a backward on Hopper returns NaN for a lse below -88 (pytorch 196678).

    It has blocks of 128 keys, and does not mask the second half of the last where that is missing.
    """
    return tile.k.shape[1] % 128 == 64 and not tile.is_causal


def _instead(tile: KernelInput) -> Kernel:
    return PaddedKernel(AtenFlashKernel(), max(tile.q.shape[3], tile.v.shape[3]))


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
