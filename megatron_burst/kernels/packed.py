"""Calls of several tiles: one by one, or as a flash kernel's sequences of many lengths."""

from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Gradients, Kernel, TileCall


def forward_one_by_one(kernel: Kernel, call: TileCall) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of several tiles by a kernel that takes one."""
    results = [kernel.forward(tile) for _, tile in call.tiles()]
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def backward_one_by_one(
    kernel: Kernel, call: TileCall, dout: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    """Return (dq, dk, dv) of several tiles by a kernel that takes one."""
    gradients = [
        kernel.backward(tile, dout[:, rows], out[:, rows], lse[:, :, rows])
        for rows, tile in call.tiles()
    ]
    dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*gradients, strict=True))
    return dq, dk, dv


def lengths_of(call: TileCall) -> dict[str, Any]:
    """Return flash-attn's arguments for the lengths of several tiles; none of one."""
    if call.packing is None:
        return {}
    return {
        "cu_seqlens_q": call.packing.query_begins,
        "cu_seqlens_k": call.packing.key_begins,
        "max_seqlen_q": max(call.packing.queries),
        "max_seqlen_k": max(call.packing.keys),
    }


def folded(call: TileCall, *tensors_BSHD: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as flash kernels take them: of several tiles [B · S, H, D]."""
    return tuple(x if call.packing is None else x.flatten(0, 1) for x in tensors_BSHD)


def folded_lse(call: TileCall, lse_BHS: Tensor) -> Tensor:
    """Return it as flash kernels take it, of several tiles [H, B · S]; they ignore its strides."""
    lse = lse_BHS if call.packing is None else lse_BHS.transpose(0, 1).flatten(1)
    return lse.contiguous()


def unfolded(call: TileCall, x: Tensor) -> Tensor:
    """Return [B, S, H, D] for what flash kernels return."""
    return x if call.packing is None else x.unflatten(0, (call.q.shape[0], -1))


def unfolded_lse(call: TileCall, lse: Tensor) -> Tensor:
    """Return [B, H, S] for what flash kernels return."""
    if call.packing is None:
        return lse
    return lse.unflatten(1, (call.q.shape[0], -1)).transpose(0, 1)
