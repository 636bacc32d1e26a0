"""What a kernel asks of a request, declared as data."""

from collections.abc import Iterable, Iterator

import torch

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import Request


class DeclaredKernel:
    """A kernel that declares what it serves: if nothing else, what FlashAttentions on GPUs do."""

    package: Package | None = None  # that has to be installed
    device = "cuda"
    # oldest and newest major compute capability; None: any
    gpus: tuple[int, int | None] = (8, None)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    largest_head: int | None = 256  # head sizes are multiples of 8 up to this; None: any
    one_head_size = True  # whether heads of K and V must be of one size
    has_soft_cap = False

    def reasons_against(self, request: Request) -> list[str]:
        """Return why the kernel cannot serve the request, in the end whether it can be imported."""
        reasons = [*self._declared_reasons(request), *self._more_reasons(request)]
        return reasons or self._late_reasons()

    def _more_reasons(self, request: Request) -> Iterable[str]:
        """Yield what of the request stands against it beside what is declared."""
        return ()

    def _late_reasons(self) -> list[str]:
        """Return what may take seconds to find out, and is only asked if nothing else is wrong."""
        return self.package.import_reasons() if self.package else []

    def _declared_reasons(self, request: Request) -> Iterator[str]:
        if self.package:
            yield from self.package.reasons_against()
        yield from self._device_reasons(request)
        if request.dtype not in self.dtypes:
            names = " or ".join(map(str, self.dtypes)).replace("torch.", "")
            yield f"the dtype is {request.dtype}, not {names}"
        sizes = request.head_dim, request.value_head_dim
        if self.one_head_size and sizes[0] != sizes[1]:
            yield "head sizes of K and V differ ({} and {})".format(*sizes)
        for size in sorted(set(sizes)):
            if self.largest_head and (size % 8 or size > self.largest_head):
                yield f"head size {size} is not a multiple of 8 up to {self.largest_head}"
        if request.soft_cap is not None and not self.has_soft_cap:
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
