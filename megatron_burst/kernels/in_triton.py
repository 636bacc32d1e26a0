"""Which small work Triton kernels do, and how they become operators of torch."""

import importlib
import os
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

SWITCH = "MEGATRON_BURST_TRITON"
_DTYPES = torch.bfloat16, torch.float16, torch.float32


def why_plain(device: torch.device, dtype: torch.dtype) -> str:
    """Return why plain torch does the small work on such tensors; empty if Triton does.

    What is not attention itself: merging, adding, row products, the loss's softmax. Every Triton
    kernel of the package asks here. All are deterministic, so that mode changes nothing.
    """
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}".replace("torch.", "")
    return _why_no_triton()


def triton_kernels(x: Tensor, module: str = "fused") -> Any | None:
    """Return the module of this room whose Triton kernels serve `x`; None: plain torch does."""
    if why_plain(x.device, x.dtype):
        return None
    # By name: it imports Triton, which only Linux has.
    return importlib.import_module(f"{__package__}.{module}")


def operator(*changed: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make an operator of torch of a function that launches a kernel and returns nothing.

    These arguments it changes in place, or only writes where its name begins with `out`. Modes that
    watch operators see it, and on fake tensors nothing runs.

    Triton launches on the current device, and operators may be given tensors of another: it is made
    that of the first argument.
    """

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        @wraps(launch)
        def launch_there(first: Tensor, *more: Any, **named: Any) -> None:
            with torch.cuda.device_of(first):
                launch(first, *more, **named)

        name, schema = launch.__name__, torch.library.infer_schema(launch, mutates_args=changed)
        torch.library.define(f"megatron_burst::{name}", schema)
        torch.library.impl(f"megatron_burst::{name}", "default", launch_there)
        torch.library.register_fake(f"megatron_burst::{name}", lambda *_, **__: None)
        return getattr(torch.ops.megatron_burst, name).default

    return register


@cache
def _why_no_triton() -> str:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    try:
        triton = importlib.import_module("triton")
        if torch.cuda.is_available():  # else the tensors are fake
            triton.runtime.driver.active.get_current_target()  # compiles what starts kernels
    except Exception as error:  # whatever it is, plain torch serves
        return f"Triton does not start: {str(error).partition('\n')[0]}"
    return ""
