"""What is installed, and which devices are here."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_burst.kernels import flash2, flash3, flash4
from megatron_burst.kernels.package import installed_version
from megatron_burst.plugin import compat
from megatron_burst.tools.hardware import Devices
from megatron_burst.transport.nccl import loaded, unread

_OTHERS = "transformer-engine apex einops psutil tensorboard pybind11 rich jinja2 "
_OTHERS += "nvidia-resiliency-ext"


@dataclass(frozen=True, slots=True)
class Part:
    """One package: its version, "" where it is missing, and what it is for."""

    name: str
    version: str
    use: str


def parts() -> list[Part]:
    """Return every package that we, or Megatron around us, may use."""
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    version: tuple[int, ...] = ()
    of_nccl = "this torch has none"
    if torch.version.cuda and torch.distributed.is_nccl_available():
        version = loaded()
        of_nccl = unread(version) or "messages between GPUs"
    try:
        megatron, where = compat.check_megatron_version(), str(compat.megatron_folder())
    except ValueError as error:
        megatron, where = "", str(error)
    flash = (flash2.PACKAGE, flash3.PACKAGE, flash4.PACKAGE)
    reasons = {p.distribution: p.reasons_against() or p.import_reasons() for p in flash}
    uses = dict.fromkeys([*reasons, *_OTHERS.split()], "")
    uses |= {name: "; ".join(why) or "an attention kernel" for name, why in reasons.items()}
    return [
        Part("Python", platform.python_version(), ""),
        Part("megatron-burst", installed_version("megatron-burst") or "from its folder", ""),
        Part("torch", torch.__version__, f"{cuda}; {torch.cuda.device_count()} GPUs here"),
        Part("NCCL", ".".join(map(str, version)), of_nccl),
        Part("cuDNN", str(torch.backends.cudnn.version() or ""), "an attention kernel"),
        Part("megatron-core", megatron, where),
        *(Part(name, installed_version(name) or "", use) for name, use in uses.items()),
    ]


def devices(hardware: Devices) -> Iterator[str]:
    """Yield the lines of the section on hardware."""
    if not hardware["gpus"]:
        yield "nvidia-smi finds no GPU"
    for i, gpu in enumerate(hardware["gpus"]):
        known = [f"{k} {v}" for k, v in gpu.items() if k != "name" and "N/A" not in v]
        yield f"GPU {i}: {gpu['name']}, {', '.join(known)}"
    yield from hardware["links"]
    yield from (f"{port['name']}: {port['rate']}, {port['state']}" for port in hardware["network"])
    if not any(":" in port["name"] for port in hardware["network"]):
        yield "no InfiniBand or RoCE port"
