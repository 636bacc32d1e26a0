"""ATen's flash attention for CPUs: returns the log-sum-exp and has a backward of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.kernels.packed import OneByOne
from megatron_burst.kernels.protocol import Gradients, KernelInput, swapped
from megatron_burst.kernels.requirements import DeclaredKernel
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.interval import Interval

_STRIPE_ROWS = 512  # of a banded tile; more rows mean fewer calls and more hidden pairs computed


class CpuKernel(OneByOne, DeclaredKernel):
    """Flash attention in torch's own CPU code; takes grouped kv heads without repeating them."""

    name = "cpu"
    device = "cpu"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    largest_head = None

    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        if tile.is_banded:
            parts = [_attend(stripe, mask) for _, _, stripe, mask in _stripes(tile)]
            out_BHSD, lse_BHS = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
        else:
            out_BHSD, lse_BHS = _attend(tile)
        return out_BHSD.transpose(1, 2), lse_BHS

    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        if not tile.is_banded:
            return _differentiate(tile, dout, out, lse)
        wide = accumulation_dtype(tile.q.dtype)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in tile.qkv)
        for rows, keys, stripe, mask in _stripes(tile):
            finished = dout[:, rows], out[:, rows], lse[:, :, rows]
            part_q, part_k, part_v = _differentiate(stripe, *finished, mask)
            dq[:, rows] = part_q
            dk[:, keys] += part_k
            dv[:, keys] += part_v
        return dq.to(tile.q.dtype), dk.to(tile.k.dtype), dv.to(tile.v.dtype)


def _stripes(tile: KernelInput) -> Iterator[tuple[slice, slice, KernelInput, Tensor | None]]:
    """Cut a banded tile into rows with the keys they see and a mask, because the kernel knows none.

    Yields the rows and the keys of a stripe, its call and its mask, no larger than the stripe.
    """
    queries, every_key = tile.q.shape[1], Interval(0, tile.k.shape[1])
    for start in range(0, queries, _STRIPE_ROWS):
        stop = min(start + _STRIPE_ROWS, queries)
        stripe = tile.band.cut(Interval(start, stop), every_key)
        assert stripe  # every query of a tile sees a key
        rows, keys, band = stripe
        mask = None
        if band != Band.FULL:
            visible = torch.from_numpy(band.visible(rows.length, keys.length))
            mask = tile.q.new_zeros(visible.shape)
            mask.masked_fill_(~visible, -torch.inf)
        q, k, v = tile.q[:, rows.as_slice], tile.k[:, keys.as_slice], tile.v[:, keys.as_slice]
        yield rows.as_slice, keys.as_slice, KernelInput(q, k, v, Band.FULL, tile.scale), mask


def _attend(tile: KernelInput, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, S, D], lse) of a full tile, a causal square, or one under a mask."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *swapped(*tile.qkv),
        0.0,
        tile.band == Band.CAUSAL,
        attn_mask=mask,
        scale=tile.scale,
    )


def _differentiate(
    tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None = None
) -> Gradients:
    grads_BHSD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *swapped(dout, *tile.qkv, out),
        lse,
        0.0,
        tile.band == Band.CAUSAL,
        attn_mask=mask,
        scale=tile.scale,
    )
    dq, dk, dv = swapped(*grads_BHSD)
    return dq, dk, dv
