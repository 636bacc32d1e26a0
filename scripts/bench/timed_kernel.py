"""Moments of a processor or of a GPU, and a kernel that notes those of its calls."""

import time
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels import Kernel, Request, TileCall


def mark(device: str) -> Any:
    """Return this moment: CPU seconds of the process, or an event of the current stream."""
    if device == "cpu":
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class TimedKernel:
    """A kernel that notes when each call began and ended, and counts its pairs of tokens."""

    def __init__(self, kernel: Kernel, device: str) -> None:
        self.name = kernel.name
        self._kernel, self._device = kernel, device
        self.calls: list[tuple[Any, Any]] = []
        self.pairs = 0

    def reasons_against(self, request: Request) -> list[str]:
        return self._kernel.reasons_against(request)

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        start = mark(self._device)
        result = self._kernel.forward(tile)
        self._note(start, tile)
        return result

    def backward(
        self, tile: TileCall, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        start = mark(self._device)
        result = self._kernel.backward(tile, dout, out, lse)
        self._note(start, tile)
        return result

    def _note(self, start: Any, tile: TileCall) -> None:
        self.calls.append((start, mark(self._device)))
        self.pairs += tile.band.pairs(tile.q.shape[1], tile.k.shape[1])
