"""Which attention kernels would serve a shape, and why the others would not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from megatron_burst.kernels import KERNELS, Request, select_kernel
from megatron_burst.tools.doctor.check import Target


@dataclass(frozen=True, slots=True)
class Served:
    """One kernel's answer to a request: no reasons against it, or these."""

    kernel: str
    reasons: tuple[str, ...]
    is_taken: bool


def served(request: Request, target: Target, asked: str = "auto") -> list[Served]:
    """Ask every kernel, in the order in which `auto` does; `asked` is that of --burst-kernel."""
    with on_the_target(target):
        try:
            taken = select_kernel(asked, request).name
        except ValueError:
            taken = ""
        return [
            Served(name, tuple(kernel.reasons_against(request)), taken.split(" ")[0] == name)
            for name, kernel in KERNELS.items()
        ]


@contextmanager
def on_the_target(target: Target) -> Iterator[None]:
    """Let torch answer as on the cluster's GPUs where that is asked for."""
    with ExitStack() as stack:
        if target.capability is not None:
            major, minor = target.capability
            properties = type("Properties", (), {"major": major, "minor": minor})
            for name, answer in (
                ("is_available", True),
                ("device_count", 1),  # cuDNN's version comes after a look at every device
                ("get_device_capability", target.capability),
                ("get_device_properties", properties),
            ):
                stack.enter_context(patch.object(torch.cuda, name, _returns(answer)))
        yield


def _returns(answer: object) -> object:
    return lambda *args, **kwargs: answer
