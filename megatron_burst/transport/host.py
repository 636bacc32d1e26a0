"""Tensors that wait in the host's pinned memory: copied there and back beside the computation.

Copies run on one stream a device. What leaves is kept until the next tensor leaves, when the
current stream waits for its copy: so its memory is free in the order of that stream, and never more
of it is held than two tensors. `record_stream` would free it when the device gets there, so that
the host's lead would become memory.
"""

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, of a buffer
_LEAST_USED = 0.93  # of a slab
_MOST = 16  # buffers of a slab


class HostMemory:
    """Takes tensors of a GPU to the host's memory; its buffers are used again.

    Shared by all that a model saves: CUDA has 32 streams to give, and NCCL's come from them, too.
    """

    def __init__(self) -> None:
        self._buffers = PinnedBuffers()
        self._side: torch.cuda.Stream | None = None
        self._leaving: _Copy | None = None
        self._arriving: _Copy | None = None

    def store(self, *tensors: Tensor) -> "Stored":
        """Start to copy tensors of one device, when they are computed; nobody may write to them."""
        self.settle()
        device, buffers = tensors[0].device, [self._buffers.take(x.nbytes) for x in tensors]
        side = self._stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        there = [_shaped(b, x) for b, x in zip(buffers, tensors, strict=True)]
        with torch.cuda.stream(side):
            for host, x in zip(there, tensors, strict=True):
                host.copy_(x, non_blocking=True)
        self._leaving = _Copy(tensors, side.record_event())
        stored = Stored(self, there, tensors)
        # A copy that overwrites a buffer comes behind those that are under way: one stream.
        weakref.finalize(stored, self._buffers.give, buffers).atexit = False
        return stored

    def settle(self) -> None:
        """Let copies that nobody waits for end, and forget them."""
        for copy in (self._leaving, self._arriving):
            if copy is not None:
                copy.wait()
        self._leaving = self._arriving = None

    def start_back(self, there: Sequence[Tensor], device: torch.device) -> "_Copy":
        """Start to copy from the host."""
        side = self._stream(device)
        back = tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in there)
        side.wait_stream(torch.cuda.current_stream(device))  # where their memory was in use
        with torch.cuda.stream(side):
            for x, host in zip(back, there, strict=True):
                x.copy_(host, non_blocking=True)
        if self._arriving is not None:  # of a backward that ended early: nobody waited
            self._arriving.wait()
        self._arriving = _Copy(back, side.record_event())
        return self._arriving

    def finish_back(self, copy: "_Copy") -> tuple[Tensor, ...]:
        """Return what came back, for use on the current stream."""
        if self._arriving is copy:
            self._arriving = None
        return copy.wait()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        return self._side


class _Copy(NamedTuple):
    """Tensors of a GPU that a copy reads or writes."""

    tensors: tuple[Tensor, ...]
    done: Any  # an event

    def wait(self) -> tuple[Tensor, ...]:
        """Return them for use on the current stream, which waits for the copy."""
        torch.cuda.current_stream(self.tensors[0].device).wait_event(self.done)
        return self.tensors


class Stored:
    """Tensors that `HostMemory` took; their buffers are free with the last reference to it."""

    def __init__(
        self, host: HostMemory, there: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        self._host, self.there, self._device = host, there, tensors[0].device
        self._taken = [weakref.ref(x) for x in tensors]
        self._back: _Copy | None = None

    @property
    def _on_card(self) -> list[Tensor]:
        """What was taken, where all of it still exists."""
        tensors = [x for taken in self._taken if (x := taken()) is not None]
        return tensors if len(tensors) == len(self._taken) else []

    def fetch(self) -> None:
        """Start to bring them back, unless they are still there or on their way."""
        if self._back is None and not self._on_card:
            self._back = self._host.start_back(self.there, self._device)

    def recall(self) -> Sequence[Tensor]:
        """Return them for use on the current stream: what was taken, or what came back of it."""
        if tensors := self._on_card:
            self._host.settle()
            return tensors
        self.fetch()
        assert self._back is not None
        back, self._back = self._back, None
        return self._host.finish_back(back)


def _shaped(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)


class PinnedBuffers:
    """Pinned memory by size: what was given back is taken again, if need be by what is smaller.

    Torch makes a power of two bytes of every request, so buffers are cut from slabs that nearly
    are one. Where sizes change from micro-batch to micro-batch, as documents make them, those that
    nobody has and that are too small by up to half are let go before more is pinned.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._taken = Counter[int]()

    def take(self, nbytes: int) -> Tensor:
        """Return at least so many bytes: uint8 [rounded up], some where none is asked for."""
        size = _rounded(nbytes)
        large = [n for n, free in self._free.items() if free and size <= n <= 2 * size]
        if not large:
            small = [n for n in self._free if size / 2 <= n < size and not self._taken[n]]
            for n in small:
                del self._free[n]
            if small:  # torch keeps what is freed, by powers of two
                torch._C._host_emptyCache()
            count = slab_count(size, self._taken[size])
            slab = torch.empty(size * count, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._free[size] += slab.split(size)
        fitting = min(large, default=size)
        self._taken[fitting] += 1
        return self._free[fitting].pop()

    def give(self, buffers: Sequence[Tensor]) -> None:
        """Take buffers back."""
        for buffer in buffers:
            self._free[len(buffer)].append(buffer)
            self._taken[len(buffer)] -= 1


def pinned_bytes(nbytes: float, count: int) -> int:
    """Return what so many tensors of a size take in slabs."""
    size, there, total = _rounded(nbytes), 0, 0
    while there < count:
        more = slab_count(size, there)
        there, total = there + more, total + 2 ** math.ceil(math.log2(more * size))
    return total


def slab_count(size: int, there: int) -> int:
    """Return of how many buffers a slab is made: few that leave little of a power of two unused.

    And, of at most 16, no more than half of those that are there and one.
    """

    def used(count: int) -> float:
        return count * size / 2 ** math.ceil(math.log2(count * size))

    counts = range(1, min(there // 2 + 1, _MOST) + 1)
    return next((n for n in counts if used(n) >= _LEAST_USED), max(counts, key=used))


def _rounded(nbytes: float) -> int:
    return max(1, math.ceil(nbytes / _ALIGNMENT)) * _ALIGNMENT
