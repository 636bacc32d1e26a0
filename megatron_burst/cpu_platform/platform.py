"""Lets Megatron's own training loop run on a machine without a GPU."""

import functools
import importlib
import logging
import os
import socket
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch

from megatron_burst.cpu_platform.table import PACKAGES, STAND_INS, current_device
from megatron_burst.plugin.compat import megatron_folder

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
    share = (
        f"{here} of them on this node" if here else "LOCAL_WORLD_SIZE does not say how many here"
    )
    if not _is_requested() and ranks > int(here or 1):
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
    return torch.cuda.current_device is current_device


def activate() -> None:
    """Put every stand-in of the table in its place; imports `megatron.training`.

    To be called once, in every rank, before anything imports Megatron; again it does nothing. Every
    rank warns, so that none is on the CPU unseen. RuntimeError if `megatron.core` is imported
    already, ValueError for a Megatron or torch that lacks one of them.
    """
    if cpu_platform_active():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "activate() has to come before megatron.core is imported: its modules compile "
            "functions while they are imported"
        )
    _set_environment()
    _replace_gpu_packages()
    _silence_warnings_of_the_platform()
    for target, make in STAND_INS.items():
        try:
            holder, name = resolve(target)
        except (ImportError, AttributeError) as error:
            where = f"for which the CPU platform stands in, is missing in {megatron_folder()}"
            raise ValueError(f"{target}, {where}: {error}") from error
        setattr(holder, name, make(getattr(holder, name)))
    logger.warning(
        "%s runs on the CPU platform, over gloo (%s): %d names of torch and Megatron stand in for "
        "CUDA",
        _place(),
        f"{REQUEST}=1" if _is_requested() else "there is no CUDA device",
        len(STAND_INS),
    )


def resolve(target: str) -> tuple[Any, str]:
    """The object that holds the name in "module:name", imported, and the name's last part.

    ImportError or AttributeError, naming what is missing, where it does not exist.
    """
    module, _, path = target.partition(":")
    *outer, name = path.split(".")
    holder = functools.reduce(getattr, outer, importlib.import_module(module))
    getattr(holder, name)
    return holder, name


def _set_environment() -> None:
    # On a machine with a GPU no library of this process shall find it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron wraps its small fused functions in torch.compile. Here that would need a C++
    # compiler on the machine and several seconds in every rank; not compiled they are the same.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _replace_gpu_packages() -> None:
    for name, names in PACKAGES.items():
        stand_in: Any = names and SimpleNamespace(**names)  # to import None fails from now
        sys.modules[name] = stand_in


def _silence_warnings_of_the_platform() -> None:
    for message in (
        "'pin_memory' argument is set as true but no accelerator is found",
        "Transformer Engine and Apex are not installed",
        "Apex is not installed",
        "Only transformer-engine>=",
    ):
        warnings.filterwarnings("ignore", message=message)
    for name, line in (
        ("torch.utils.cpp_extension", "No CUDA runtime is found"),
        # One generator serves as the CPU's and as CUDA's, so this is true at every dropout.
        ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
    ):
        logging.getLogger(name).addFilter(functools.partial(_is_another_line, line))


def _is_another_line(line: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(line)
