"""Every kernel's tiles against dense attention in float64, corners with known bugs first."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, product
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_burst.kernels import KERNELS, Kernel, KernelInput, Request, select_kernel
from megatron_burst.kernels.protocol import Packing
from megatron_burst.plans.visibility.band import Band
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_most, relative_error
from megatron_burst.tools.one_rank import drawing

REMEDY = "do not train with the kernel that the lines name; --burst-kernel takes another"
ALLOWED = 2e-2  # of the norm; right kernels in bfloat16 were at two thirds of it, with two tokens
_NAMES = ("out", "lse", "dq", "dk", "dv")
_MOST_SHOWN = 5  # failures of a kernel


class Case(NamedTuple):
    """One tile, or a packing of several."""

    band: Band
    queries: int
    keys: int
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    score: float = 0.0  # what all others are around
    dtype: torch.dtype = DTYPE
    lengths: tuple[int, ...] = ()  # of packed squares

    def request(self, device: torch.device) -> Request:
        """Return what a kernel is asked."""
        heads, dims = (self.heads, self.kv_heads), (self.dim, self.value_dim)
        banded = self.band.is_banded(self.queries, self.keys)
        packed = bool(self.lengths)
        return Request(device, self.dtype, *heads, *dims, is_banded=banded, has_documents=packed)

    def tile(self, device: torch.device) -> tuple[KernelInput, Tensor]:
        """Draw q, k, v and dout; the first three are slices, as in a ring."""
        draw = drawing(device, self.dtype)

        def drawn(tokens: int, heads: int, dim: int) -> Tensor:
            return draw(1, tokens + 1, heads, dim)[:, 1:]

        q, k = drawn(self.queries, self.heads, self.dim), drawn(self.keys, self.kv_heads, self.dim)
        v = drawn(self.keys, self.kv_heads, self.value_dim)
        if self.score:
            q[..., 0], k[..., 0] = 1.0, self.score * self.dim**0.5
        packing = None
        if self.lengths:
            begins = torch.tensor([*accumulate(self.lengths, initial=0)]).to(device, torch.int32)
            packing = Packing(self.lengths, self.lengths, begins, begins)
        tile = KernelInput(q, k, v, self.band, self.dim**-0.5, packing=packing)
        return tile, drawn(self.queries, self.heads, self.value_dim)


# Where kernels returned NaN or wrong numbers. Below -88.7 = -log(largest float32) exp(-lse) is
# infinite: cuDNN with 64 keys in the last 128 (pytorch 196678), with one query (cudnn-frontend
# 1072), with fewer than 8 kv heads on sm_100 (pytorch 193893).
CORNERS = (
    Case(Band.CAUSAL, 192, 192, 8, 8, score=-120.0),
    Case(Band.FULL, 128, 704, 8, 8, score=-120.0),
    Case(Band.FULL, 64, 64, 8, 8, score=-120.0),
    Case(Band.FULL, 1, 128, 8, 8, score=-128.0),
    Case(Band.FULL, 1, 97, 8, 8, score=-128.0),
    *(Case(Band.CAUSAL, 512, 512, 8, kv_heads) for kv_heads in (4, 2, 1)),
    Case(Band.FULL, 128, 1024, 8, 1),
)
_DIMS = (40, 80, 96, 128, 160, 192, 256)
_LENGTHS = ((256, 256), (64, 448), (320, 64), (2, 2), (129, 257), (1000, 1000), (704, 128))


def cases(*, all_of_them: bool) -> Iterator[Case]:
    """Yield the corners, then head sizes, bands, a packing, and lengths with few kv heads."""
    yield from CORNERS
    for dim, value_dim in ((192, 128), *((dim, dim) for dim in _DIMS)):
        yield Case(Band.CAUSAL, 129, 129, dim=dim, value_dim=value_dim)
    yield Case(Band.CAUSAL, 129, 129, dtype=torch.float16)
    yield Case(Band(48, 0), 192, 192)
    yield Case(Band(None, 63), 64, 127)
    yield Case(Band.CAUSAL, 194, 194, lengths=(64, 1, 129))
    for (queries, keys), kv_heads in product(_LENGTHS, (8, 2, 1)) if all_of_them else ():
        for band in (Band.FULL, Band.CAUSAL)[: 1 + (queries == keys)]:
            yield Case(band, queries, keys, kv_heads=kv_heads, dim=128, value_dim=128)


def check(device: Device) -> Iterator[Check]:
    """Compare the kernels that serve this device."""
    every = [*cases(all_of_them=device.is_gpu)]
    for name in device.kernels(8, 8, 64):
        yield from _of_kernel(device, name, every)


def _of_kernel(device: Device, name: str, tried: Iterable[Case]) -> Iterator[Check]:
    worst, where, refused, wrong = 0.0, "", Counter[str](), 0
    for number, case in enumerate(tried):
        try:
            kernel = select_kernel(name, case.request(device.device))
        except ValueError as error:
            refused[str(error).rpartition(f"{name}: ")[2]] += 1
            continue
        try:
            apart, tensor = max(errors(device, kernel, case))
        except Exception as error:  # the other cases are worth a look all the same
            first = str(error).partition("\n")[0]
            apart, tensor = torch.inf, f"{type(error).__name__}: {first}"
        wrong += (is_wrong := not apart <= ALLOWED)
        if apart >= worst:
            worst, where = apart, f" ({tensor}: {case})"
        if is_wrong and wrong <= _MOST_SHOWN:
            yield at_most(f"{name}, case {number}: {case}", apart, ALLOWED, more=f" of {tensor}")
    yield at_most(f"{name}, the worst case", worst, ALLOWED, more=where)
    for reason, times in refused.items():
        yield Check(f"{name} refused {times} cases", reason)


def errors(device: Device, kernel: Kernel, case: Case) -> Iterator[tuple[float, str]]:
    """Yield the relative error of every result, and its name."""
    tile, dout = case.tile(device.device)
    out, lse = kernel.forward(tile)
    actual = out, lse, *kernel.backward(tile, dout, out, lse)
    q, k, v = (x.double() for x in tile.qkv)
    exact, reference = replace(tile, q=q, k=k, v=v), KERNELS["reference"]
    out, lse = reference.forward(exact)
    expected = out, lse, *reference.backward(exact, dout.double(), out, lse)
    for name, mine, right in zip(_NAMES, actual, expected, strict=True):
        if name == "dq" and case.score:  # its first column is 0, of terms as large as the score
            yield (0.0 if mine.isfinite().all() else torch.inf), name
            mine, right = mine[..., 1:], right[..., 1:]
        yield relative_error(mine, right), name
