"""What is installed, which devices are here, what is set, and what of it harms a ring."""

import importlib.util
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron_burst.kernels import flash2, flash3, flash4
from megatron_burst.kernels.package import Package
from megatron_burst.plugin import compat
from megatron_burst.tools.doctor.situation import Finding, Level
from megatron_burst.tools.hardware import Hardware, installed

PINNED_TRANSFORMER_ENGINE = "2.17.1"  # by Megatron-Core 0.19
_FLASH: tuple[Package, ...] = (flash2.PACKAGE, flash3.PACKAGE, flash4.PACKAGE)
_OTHERS: Mapping[str, str] = {
    "apex": "norms and sums, where TransformerEngine is missing",
    "einops": "Megatron's hierarchical groups",
    "psutil": "Megatron's checkpoints",
    "tensorboard": "Megatron's log of losses",
    "pybind11": "Megatron's data-set helpers, in a checkout",
    "nvidia-resiliency-ext": "Megatron's local checkpoints",
    "rich": "tables of other verbs",
    "matplotlib": "pictures of other verbs",
}
_SLOW = {
    "NCCL_P2P_DISABLE": "messages between GPUs of a node go through the host's memory",
    "NCCL_SHM_DISABLE": "messages between GPUs of a node go through the network",
    "NCCL_IB_DISABLE": "messages between nodes go over TCP sockets",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel, so nothing overlaps",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One package: its version, "" where it is missing, and what it is for."""

    name: str
    version: str
    use: str


def parts() -> list[Part]:
    """Return every package that we, or Megatron around us, may use."""
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    nccl = torch.version.cuda and torch.distributed.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
    return [
        Part("Python", platform.python_version(), ""),
        Part("megatron-burst", installed("megatron-burst") or "from its folder", ""),
        Part("torch", torch.__version__, f"{cuda}; {torch.cuda.device_count()} GPUs here"),
        Part("NCCL", version, "messages between GPUs" if nccl else "this torch has none"),
        Part("cuDNN", str(torch.backends.cudnn.version() or ""), "an attention kernel"),
        _megatron(),
        _transformer_engine(),
        *(Part(p.distribution, installed(p.distribution), _flash_use(p)) for p in _FLASH),
        *(Part(name, installed(name), use) for name, use in _OTHERS.items()),
    ]


def _megatron() -> Part:
    try:
        return Part("megatron-core", compat.check_megatron_version(), str(compat.megatron_folder()))
    except ValueError as error:
        return Part("megatron-core", "", str(error))


def _transformer_engine() -> Part:
    version = installed("transformer-engine")
    use = "linear layers, norms and rotary embeddings"
    if importlib.util.find_spec("transformer_engine") is None:
        use = "Megatron's local layers are used; its own context parallelism needs it"
    elif version != PINNED_TRANSFORMER_ENGINE:
        use = f"{use}; {PINNED_TRANSFORMER_ENGINE} was checked"
    return Part("transformer-engine", version, use)


def _flash_use(package: Package) -> str:
    reasons = package.reasons_against() or package.import_reasons()
    return "; ".join(reasons) or "an attention kernel"


def devices(hardware: Hardware) -> Iterator[str]:
    """Yield the lines of the section on hardware."""
    if not hardware.gpus:
        yield "nvidia-smi finds no GPU"
    for i, gpu in enumerate(hardware.gpus):
        known = [f"{k} {v}" for k, v in gpu.items() if k != "name" and "N/A" not in v]
        yield f"GPU {i}: {gpu['name']}, {', '.join(known)}"
    kinds: dict[str, list[str]] = {}
    for pair, link in hardware.links.items():
        kinds.setdefault(link, []).append(pair)
    yield from (f"{link}: {' '.join(pairs)}" for link, pairs in kinds.items())
    yield from (f"{port['name']}: {port['rate']}, {port['state']}" for port in hardware.network)
    if not any(":" in port["name"] for port in hardware.network):
        yield "no InfiniBand or RoCE port"


def device_findings(hardware: Hardware) -> Iterator[Finding]:
    """Say what of the hardware slows a ring down or breaks it."""
    kinds = sorted({f"{gpu['name']} of {gpu['memory.total']}" for gpu in hardware.gpus})
    if len(kinds) > 1:
        text = f"the GPUs differ ({', '.join(kinds)}): every step waits for the slowest"
        yield Finding("unequal-gpus", Level.WARNING, text)
    if any(gpu.get("mig.mode.current") == "Enabled" for gpu in hardware.gpus):
        text = "GPUs are cut up (MIG): their parts have no links to each other"
        yield Finding("mig", Level.WARNING, text, "nvidia-smi -mig 0")
    if apart := [pair for pair, link in hardware.links.items() if link == "SYS"]:
        text = f"{len(apart)} pairs of GPUs reach each other only between CPU sockets"
        yield Finding("far-gpus", Level.WARNING, text)


def variable_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Say what is set against a run's interest."""
    for name, why in _SLOW.items():
        if environment.get(name, "0") not in ("0", ""):
            text = f"{name}={environment[name]}: {why}"
            yield Finding("slow-links", Level.WARNING, text, f"unset {name}")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if environment.get(name) == "0":
            text = f"{name}=0: torch ends no job whose rank is lost or stalls"
            yield Finding("stalls-unseen", Level.WARNING, text, f"unset {name}")
