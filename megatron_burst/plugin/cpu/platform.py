"""Lets Megatron's own training loop run on a machine without a GPU."""

import importlib
import logging
import os
import socket
import sys
import warnings
from functools import partial
from typing import Any

import torch

from megatron_burst.plugin.cpu import table as cpu_platform_table
from megatron_burst.plugin.cpu.table import MEGATRON_STAND_INS, TORCH_STAND_INS, StandIn

logger = logging.getLogger(__name__)

REQUEST = "MEGATRON_BURST_CPU"


def cpu_platform_wanted() -> bool:
    """True where there is no CUDA device, or where the environment has MEGATRON_BURST_CPU=1."""
    # The request comes first: asking torch starts CUDA's driver on a machine that has one.
    return _is_requested() or not torch.cuda.is_available()


def check_job() -> None:
    """Refuse the CPU platform unasked where the job may be on several nodes.

    A node whose driver is broken would join the others' GPUs as a CPU.

    Raises:
        ValueError: WORLD_SIZE is above LOCAL_WORLD_SIZE, or that is not set (torchrun sets it), and
            MEGATRON_BURST_CPU is not 1.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    here = os.environ.get("LOCAL_WORLD_SIZE")
    if _is_requested() or ranks <= int(here or 1):
        return
    share = (
        f"{here} of them on this node" if here else "LOCAL_WORLD_SIZE does not say how many here"
    )
    raise ValueError(
        f"{_place()} has no CUDA device, and the job has {ranks} ranks, {share}: see what "
        f"nvidia-smi says on that node, or set {REQUEST}=1 on every node to train on CPUs"
    )


def _is_requested() -> bool:
    return os.environ.get(REQUEST) == "1"


def _place() -> str:
    return f"rank {os.environ.get('RANK', '0')} on node {socket.gethostname()}"


def cpu_platform_active() -> bool:
    """Whether `activate` has been called in this process."""
    return torch.cuda.current_device is cpu_platform_table.current_device


def activate() -> None:
    """Put every stand-in of the table in its place; imports `megatron.training`.

    To be called once, in every rank, before anything imports Megatron; again it does nothing. Every
    rank warns, so that none is on the CPU unseen. RuntimeError if `megatron.core` is imported
    already.
    """
    if cpu_platform_active():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "activate() has to come before megatron.core is imported: its modules compile "
            "functions while they are imported"
        )
    _set_environment()
    _hide_gpu_packages()
    _silence_warnings_of_the_platform()
    for stand_in in (*TORCH_STAND_INS, *MEGATRON_STAND_INS):
        _install(stand_in)
    logger.warning(
        "%s runs on the CPU platform, over gloo (%s): %d names of torch and %d of Megatron "
        "stand in for CUDA",
        _place(),
        f"{REQUEST}=1" if _is_requested() else "there is no CUDA device",
        len(TORCH_STAND_INS),
        len(MEGATRON_STAND_INS),
    )


def resolve(target: str) -> tuple[Any, str]:
    """The object that holds a dotted name, imported as far as needed, and the name's last part.

    AttributeError, naming the target, where it does not exist.
    """
    *path, name = target.split(".")
    holder: Any = importlib.import_module(path[0])
    for depth, part in enumerate(path[1:], start=2):
        if not hasattr(holder, part):
            module = ".".join(path[:depth])
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
                raise AttributeError(f"{target} does not exist: {module} is no module") from error
        holder = getattr(holder, part)
    if not hasattr(holder, name):
        raise AttributeError(f"{target} does not exist in this version")
    return holder, name


def _install(stand_in: StandIn) -> None:
    holder, name = resolve(stand_in.target)
    setattr(holder, name, stand_in.make(getattr(holder, name)))


def _set_environment() -> None:
    # On a machine with a GPU no library of this process shall find it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron wraps its small fused functions in torch.compile. Here that would need a C++
    # compiler on the machine and several seconds in every rank; not compiled they are the same.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


# Megatron takes their layers, norms and optimizers wherever they can be imported. Without the first
# the second, which Megatron also imports by itself, fails for symbols that only the first loads.
_GPU_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex")


def _hide_gpu_packages() -> None:
    for name in _GPU_PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # to import it fails from now


_WARNINGS_OF_THE_PLATFORM = (
    "'pin_memory' argument is set as true but no accelerator is found",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine>=",
)
_LOG_LINES_OF_THE_PLATFORM = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    # One generator serves as the CPU's and as CUDA's, so this is true at every dropout.
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
}


def _silence_warnings_of_the_platform() -> None:
    for message in _WARNINGS_OF_THE_PLATFORM:
        warnings.filterwarnings("ignore", message=message)
    for name, line in _LOG_LINES_OF_THE_PLATFORM.items():
        logging.getLogger(name).addFilter(partial(_is_another_line, line))


def _is_another_line(line: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(line)
