"""Calls of several tiles: one by one, or as a flash kernel's sequences of many lengths."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels.protocol import Gradients, KernelInput


class _OfOne(ABC):
    """What a kernel does itself; arguments and results are those of `Kernel`, but for lengths."""

    @abstractmethod
    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients: ...


class OneByOne(_OfOne):
    """A kernel that takes one tile at a time."""

    def forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        if tile.packing is None:
            return self._forward(tile)
        outs, lses = zip(*(self._forward(one) for _, one in tile.tiles()), strict=True)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=2)

    def backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return (dq, dk, dv); see `Kernel`."""
        if tile.packing is None:
            return self._backward(tile, dout, out, lse)
        gradients = [
            self._backward(one, dout[:, rows], out[:, rows], lse[:, :, rows])
            for rows, one in tile.tiles()
        ]
        dq, dk, dv = (torch.cat(parts, dim=1) for parts in zip(*gradients, strict=True))
        return dq, dk, dv


class InSequences(_OfOne):
    """A kernel that takes several tiles as sequences: [B · S, H, D], and lse [H, B · S]."""

    def forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        if tile.packing is None:
            return self._forward(tile)
        out, lse = self._forward(_folded(tile))
        batch = tile.q.shape[0]
        return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)

    def backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return (dq, dk, dv); see `Kernel`."""
        if tile.packing is None:  # of lse flash kernels ignore the strides
            return self._backward(tile, dout, out, lse.contiguous())
        lse_HS = lse.transpose(0, 1).flatten(1).contiguous()
        finished = dout.flatten(0, 1), out.flatten(0, 1), lse_HS
        gradients = self._backward(_folded(tile), *finished)
        dq, dk, dv = (x.unflatten(0, (tile.q.shape[0], -1)) for x in gradients)
        return dq, dk, dv


def _folded(tile: KernelInput) -> KernelInput:
    q, k, v = (x.flatten(0, 1) for x in tile.qkv)
    return replace(tile, q=q, k=k, v=v)


def flash_settings(call: KernelInput, no_limit: int | None = None) -> dict[str, Any]:
    """Return flash-attn's arguments for the scale, the window and the lengths of several tiles."""
    left, right = (no_limit if limit is None else limit for limit in call.window)
    window = {"window_size_left": left, "window_size_right": right}
    return {"softmax_scale": call.scale, **window, **lengths_of(call)}


def lengths_of(call: KernelInput) -> dict[str, Any]:
    """Return flash-attn's arguments for the lengths of several tiles; none of one."""
    if call.packing is None:
        return {}
    return {
        "cu_seqlens_q": call.packing.query_begins,
        "cu_seqlens_k": call.packing.key_begins,
        "max_seqlen_q": max(call.packing.query_lengths),
        "max_seqlen_k": max(call.packing.key_lengths),
    }
