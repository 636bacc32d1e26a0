"""What a kernel asks of a request, declared as data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request

HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """What a kernel serves; by default what a FlashAttention on NVIDIA GPUs does."""

    package: Package | None = None
    """That has to be installed."""
    device: str = "cuda"
    gpus: tuple[int, int | None] = (8, None)
    """The oldest and the newest major compute capability; None: any that is newer."""
    dtypes: tuple[torch.dtype, ...] = HALF_PRECISION
    largest_head: int | None = 256
    """Head sizes are multiples of 8 up to this; None: any."""
    one_head_size: bool = True
    """Whether heads of K and V must be of one size."""
    soft_cap: bool = False
    """Whether the kernel has soft caps."""

    def reasons_against(self, request: Request, *more: str) -> list[str]:
        """Return why the request, or `more` than that, stands against the kernel.

        Only where nothing does is the package imported, which may take seconds.
        """
        reasons = [*self._reasons(request), *more]
        return reasons or (self.package.import_reasons() if self.package else [])

    def _reasons(self, request: Request) -> Iterator[str]:
        if self.package:
            yield from self.package.reasons_against()
        yield from self._device_reasons(request)
        if request.dtype not in self.dtypes:
            names = " or ".join(map(str, self.dtypes)).replace("torch.", "")
            yield f"the dtype is {request.dtype}, not {names}"
        sizes = request.head_dim, request.value_head_dim
        if self.one_head_size and sizes[0] != sizes[1]:
            yield "head sizes of K and V differ ({} and {})".format(*sizes)
        for size in sorted(set(sizes)) if self.largest_head else ():
            if size % 8 or size > (self.largest_head or size):
                yield f"head size {size} is not a multiple of 8 up to {self.largest_head}"
        if request.soft_cap is not None and not self.soft_cap:
            yield "it has no soft cap"

    def _device_reasons(self, request: Request) -> Iterator[str]:
        if request.device.type != self.device:
            yield f"the tensors are on {request.device.type}"
        elif self.device == "cuda" and torch.version.cuda is None:
            yield "this torch was not built for NVIDIA GPUs"
        elif self.device == "cuda":
            major, minor = torch.cuda.get_device_capability(request.device)
            oldest, newest = self.gpus
            if major < oldest:
                yield f"the GPU has compute capability {major}.{minor}, older than {oldest}.0"
            if newest is not None and major > newest:
                yield f"the GPU has compute capability {major}.{minor}, newer than {newest}.x"
