"""What is installed, and which parts of it are in use."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_burst.kernels import flash2, flash3, flash4
from megatron_burst.kernels.package import Package
from megatron_burst.plugin import compat

PINNED_TRANSFORMER_ENGINE = "2.17.1"  # by Megatron-Core 0.19
_FLASH: tuple[Package, ...] = (flash2.PACKAGE, flash3.PACKAGE, flash4.PACKAGE)
_OF_MEGATRON: Mapping[str, str] = {
    "einops": "Megatron's hierarchical groups",
    "psutil": "Megatron's checkpoints",
    "tensorboard": "Megatron's log of losses",
    "pybind11": "Megatron's data-set helpers, in a checkout",
    "nvidia-resiliency-ext": "Megatron's local checkpoints",
    "nvidia-ml-py": "this tool's section on hardware",
    "rich": "tables of other tools here",
    "matplotlib": "figures of other tools here",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One package: its version, "" where it is missing, and what it is for."""

    name: str
    version: str
    use: str


def parts() -> list[Part]:
    """Return every package that we, or Megatron around us, may use."""
    return [
        Part("Python", platform.python_version(), ""),
        Part("megatron-burst", _version("megatron-burst") or "from its folder", ""),
        Part("torch", torch.__version__, _torch_use()),
        Part("NCCL", _nccl(), "messages between GPUs" if _nccl() else "this torch has none"),
        _megatron(),
        _transformer_engine(),
        _apex(),
        *(Part(p.distribution, _version(p.distribution), _flash_use(p)) for p in _FLASH),
        *(Part(name, _version(name), use) for name, use in _OF_MEGATRON.items()),
    ]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch_use() -> str:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"{built}; {count} GPUs here"


def _nccl() -> str:
    if not torch.version.cuda or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _megatron() -> Part:
    try:
        return Part("megatron-core", compat.check_megatron_version(), str(compat.megatron_folder()))
    except ValueError as error:
        return Part("megatron-core", "", str(error))


def _transformer_engine() -> Part:
    version = _version("transformer-engine")
    if importlib.util.find_spec("transformer_engine") is None:
        use = "Megatron's local layers are used; its own context parallelism needs it"
    elif version != PINNED_TRANSFORMER_ENGINE:
        use = f"linear layers, norms and rotary embeddings; {PINNED_TRANSFORMER_ENGINE} was checked"
    else:
        use = "linear layers, norms and rotary embeddings; core attention is ours"
    return Part("transformer-engine", version, use)


def _apex() -> Part:
    if importlib.util.find_spec("apex") is None:
        return Part("apex", "", "torch's norms and sums are used without TransformerEngine")
    there = [
        extension
        for extension in compat.APEX_EXTENSIONS.values()
        if importlib.util.find_spec(extension) is not None
    ]
    return Part("apex", _version("apex") or "there", f"extensions: {', '.join(there) or 'none'}")


def _flash_use(package: Package) -> str:
    reasons = package.reasons_against() or package.import_reasons()
    return "; ".join(reasons) or "an attention kernel"
