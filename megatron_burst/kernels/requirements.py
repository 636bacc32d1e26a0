"""What several kernels ask of a request, each as the reasons why it is not met."""

import torch

from megatron_burst.kernels.protocol import Request


def on_gpu(request: Request, oldest: int, newest: int | None = None) -> list[str]:
    """Ask for an NVIDIA GPU whose major compute capability is in this range."""
    if request.device.type != "cuda":
        return [f"the tensors are on {request.device.type}"]
    if torch.version.cuda is None:
        return ["this torch was not built for NVIDIA GPUs"]
    major, minor = torch.cuda.get_device_capability(request.device)
    if major < oldest:
        return [f"the GPU has compute capability {major}.{minor}, older than {oldest}.0"]
    if newest is not None and major > newest:
        return [f"the GPU has compute capability {major}.{minor}, newer than {newest}.x"]
    return []


def half_precision(request: Request) -> list[str]:
    """Ask for bfloat16 or float16."""
    if request.dtype in (torch.bfloat16, torch.float16):
        return []
    return [f"the dtype is {request.dtype}, not bfloat16 or float16"]


def one_head_size(request: Request) -> list[str]:
    """Ask for K and V with heads of one size."""
    sizes = request.head_dim, request.value_head_dim
    return (
        [] if sizes[0] == sizes[1] else ["head sizes of K and V differ ({} and {})".format(*sizes)]
    )


def head_sizes_to(request: Request, largest: int) -> list[str]:
    """Ask for head sizes that are multiples of 8 and at most `largest`."""
    return [
        f"head size {size} is not a multiple of 8 up to {largest}"
        for size in sorted({request.head_dim, request.value_head_dim})
        if size % 8 or size > largest
    ]


def no_soft_cap(request: Request) -> list[str]:
    """Ask for scores without a soft cap."""
    return [] if request.soft_cap is None else ["it has no soft cap"]
