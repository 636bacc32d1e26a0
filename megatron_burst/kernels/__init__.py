"""The attention kernels, one file each, in one table; the first that has no objection runs."""

from collections.abc import Iterator, Mapping
from itertools import chain, takewhile

import torch

from megatron_burst.kernels.aten_flash import AtenFlashKernel
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.kernels.cudnn import CudnnKernel
from megatron_burst.kernels.flash2 import Flash2Kernel
from megatron_burst.kernels.flash3 import Flash3Kernel
from megatron_burst.kernels.flash4 import Flash4Kernel
from megatron_burst.kernels.padded import PaddedKernel
from megatron_burst.kernels.protocol import Kernel, KernelInput, Request
from megatron_burst.kernels.reference import ReferenceKernel

__all__ = ["KERNELS", "Kernel", "Request", "KernelInput", "passed_over", "select_kernel"]

_OLDEST_TORCH = 2, 9  # before, cuDNN's attention takes and returns another log-sum-exp


def check_torch_version() -> None:
    """Raise an ImportError that says what to install if torch is older; a pre-release is not."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        raise ImportError(
            "megatron_burst needs torch {0}.{1} or newer, and {2} is installed: pip install "
            "'torch>={0}.{1}', or take a newer image".format(*_OLDEST_TORCH, torch.__version__)
        )


check_torch_version()

# In the order in which `auto` asks them, fastest first. Within a class of about the same speed, one
# that takes the head sizes as they are goes before one that needs zeros in K or V. flash3 serves
# Hopper alone, where flash4 is no faster (74.3 and 74.1 ms for 40k tokens forward and backward,
# ecmwf/anemoi-core 959), leaves no room to messages and compiles at its first call.
_SPEED_CLASSES: tuple[tuple[Kernel, ...], ...] = (
    (Flash3Kernel(), Flash4Kernel(), CudnnKernel()),
    (Flash2Kernel(), AtenFlashKernel()),
    (CpuKernel(),),
)

KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel for kernel in (*chain(*_SPEED_CLASSES), ReferenceKernel())
}


def select_kernel(name: str, request: Request) -> Kernel:
    """Return the kernel called `name`, or for "auto" the first that can serve the request.

    Where K and V have heads of two sizes and a kernel wants one, it is wrapped in a `PaddedKernel`.
    "auto" never takes `reference`: dense scores in float64 would exhaust memory where people least
    expect it. If none serves, a ValueError has every backend's reasons.
    """
    check_kernel_name(name)
    reasons = {}
    for kernel in _candidates(name, request):
        reasons[kernel.name] = kernel.reasons_against(request)
        if not reasons[kernel.name]:
            return kernel
    listed = "\n".join(f"  {n}: {'; '.join(reasons[n])}" for n in KERNELS if n in reasons)
    raise ValueError(f"--burst-kernel {name}: no kernel can serve {request}\n{listed}")


def passed_over(chosen: Kernel, request: Request) -> str:
    """Say which kernels for the device `auto` passed over before `chosen`, and why."""
    earlier = takewhile(lambda kernel: kernel != chosen, _candidates("auto", request))
    against = {
        kernel.name: [*kernel.reasons_against(request)]
        for kernel in earlier
        if kernel.name in KERNELS  # a padded one has the same reasons
    }
    elsewhere = f"the tensors are on {request.device.type}"
    objections = {name: reasons for name, reasons in against.items() if elsewhere not in reasons}
    return "; ".join(f"not {name}: {', '.join(reasons)}" for name, reasons in objections.items())


def check_kernel_name(name: str) -> None:
    """Raise a ValueError that lists the kernels if there is none called `name`."""
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"--burst-kernel {name} is unknown; there are: auto, {', '.join(KERNELS)}")


def _candidates(name: str, request: Request) -> Iterator[Kernel]:
    size = max(request.head_dim, request.value_head_dim)
    for kernels in _SPEED_CLASSES if name == "auto" else ((KERNELS[name],),):
        yield from kernels
        if request.head_dim != request.value_head_dim:
            yield from (PaddedKernel(kernel, size) for kernel in kernels)
