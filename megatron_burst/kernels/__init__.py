"""The attention kernels, one file each, in one table; the first that has no objection runs."""

from collections.abc import Mapping
from itertools import takewhile

from megatron_burst.kernels.aten_flash import AtenFlashKernel
from megatron_burst.kernels.cpu import CpuKernel
from megatron_burst.kernels.cudnn import CudnnKernel
from megatron_burst.kernels.protocol import Kernel, Request
from megatron_burst.kernels.reference import ReferenceKernel

__all__ = ["KERNELS", "Kernel", "Request", "passed_over", "select_kernel"]

# In the order in which `auto` asks them.
KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (CudnnKernel(), AtenFlashKernel(), CpuKernel(), ReferenceKernel())
}


def select_kernel(name: str, request: Request) -> Kernel:
    """Return the kernel called `name`, or for "auto" the first that can serve the request.

    "auto" never takes `reference`: dense scores in float64 would exhaust memory where people least
    expect it.

    Raises:
        ValueError: the name is unknown, or the kernel cannot serve the request; the message has
            every backend's reasons.
    """
    check_kernel_name(name)
    names = [n for n in KERNELS if n != "reference"] if name == "auto" else [name]
    reasons = {n: KERNELS[n].reasons_against(request) for n in names}
    for kernel_name, against in reasons.items():
        if not against:
            return KERNELS[kernel_name]
    listed = "\n".join(f"  {n}: {'; '.join(against)}" for n, against in reasons.items())
    raise ValueError(f"--burst-kernel {name}: no kernel can serve {request}\n{listed}")


def passed_over(chosen: Kernel, request: Request) -> str:
    """Say which kernels `auto` asked before it took `chosen`, and what stood against each."""
    earlier = takewhile(lambda kernel: kernel is not chosen, KERNELS.values())
    return "; ".join(f"not {k.name}: {', '.join(k.reasons_against(request))}" for k in earlier)


def check_kernel_name(name: str) -> None:
    """Raise a ValueError that lists the kernels if there is none called `name`."""
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"--burst-kernel {name} is unknown; there are: auto, {', '.join(KERNELS)}")
