"""Lets Megatron's own training loop run on a machine without a GPU."""

import argparse
import importlib
import logging
import os
import socket
import sys
import warnings
from functools import partial
from typing import Any

import torch

from megatron_burst.plugin import compat, cpu_platform_table
from megatron_burst.plugin.cpu_platform_table import MEGATRON_STAND_INS, TORCH_STAND_INS, StandIn

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


CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    **compat.DEFAULTS_WITHOUT_TRANSFORMER_ENGINE,
    "use_cpu_initialization": True,
    # Written to be compiled; without a compiler torch's own operators are faster.
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    # A loader process for each rank and split costs more than it hides.
    "num_workers": 0,
}


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Make `CPU_DEFAULTS` the defaults of Megatron's parser. Flags that the user gives still win.

    To be called after Megatron's arguments were added. ValueError for a flag the parser lacks.
    """
    known = {action.dest for action in parser._actions}
    if missing := CPU_DEFAULTS.keys() - known:
        raise ValueError(f"Megatron's parser has no arguments {sorted(missing)}")
    parser.set_defaults(**CPU_DEFAULTS)


# (argument, the values that work, what to do instead)
_CPU_LIMITS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("transformer_impl", ("local",), "TransformerEngine needs a GPU: --transformer-impl local"),
    ("distributed_backend", ("gloo",), "NCCL needs a GPU: --distributed-backend gloo"),
    ("fp8", (None,), "FP8 kernels need a GPU: drop --fp8-format, use --bf16 or float32"),
    ("fp4", (None,), "FP4 kernels need a GPU: drop --fp4-format, use --bf16 or float32"),
    ("cuda_graph_impl", ("none",), "there are no CUDA graphs: drop --cuda-graph-impl"),
    ("enable_cuda_graph", (False,), "there are no CUDA graphs: drop --enable-cuda-graph"),
    ("external_cuda_graph", (False,), "there are no CUDA graphs: drop --external-cuda-graph"),
    ("optimizer_cuda_graph", (False,), "there are no CUDA graphs: drop --optimizer-cuda-graph"),
    ("gradient_accumulation_fusion", (False,), "pass --no-gradient-accumulation-fusion"),
    ("masked_softmax_fusion", (False,), "pass --no-masked-softmax-fusion"),
    ("apply_rope_fusion", (False,), "pass --no-rope-fusion"),
    ("no_persist_layer_norm", (True,), "pass --no-persist-layer-norm"),
    ("tp_comm_overlap", (False,), "it is TransformerEngine's: drop --tp-comm-overlap"),
    ("use_torch_fsdp2", (False,), "use --use-megatron-fsdp or --use-distributed-optimizer instead"),
    ("nccl_ub", (False,), "drop --use-nccl-ub"),
    ("use_sharp", (False,), "drop --use-sharp"),
    ("cpu_offloading_num_layers", (0,), "memory is the CPU's already: drop it"),
    ("fine_grained_activation_offloading", (False,), "memory is the CPU's already: drop it"),
    ("optimizer_cpu_offload", (False,), "the optimizer runs on the CPU already: drop it"),
    ("use_precision_aware_optimizer", (False,), "it is TransformerEngine's optimizer: drop it"),
    ("moe_permute_fusion", (False,), "it is TransformerEngine's: drop --moe-permute-fusion"),
    ("moe_router_fusion", (False,), "it is TransformerEngine's: drop --moe-router-fusion"),
    ("moe_token_dispatcher_type", ("allgather", "alltoall"), "use alltoall"),
    ("batch_invariant_mode", (False,), "its kernels are Triton's: drop --batch-invariant-mode"),
    ("nvtx_ranges", (False,), "it marks ranges for CUDA's profiler: drop --nvtx-ranges"),
    ("record_memory_history", (False,), "it records CUDA's allocator: drop it"),
)


def check_cpu_arguments(args: argparse.Namespace) -> None:
    """ValueError naming every argument that cannot work without a GPU and what to use instead."""
    reasons = [
        f"--{name.replace('_', '-')} = {getattr(args, name)}: {instead}"
        for name, working, instead in _CPU_LIMITS
        if getattr(args, name, working[0]) not in working
    ]
    if args.profile and not args.use_pytorch_profiler:
        reasons.append("--profile starts CUDA's profiler: add --use-pytorch-profiler")
    if reasons:
        raise ValueError("this cannot run on a CPU:\n  " + "\n  ".join(reasons))
