"""What Megatron's arguments have to be without a GPU: other defaults, and refusals."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_burst.plugin import compat


def with_cpu_arguments(parse_args: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `parse_args` with `CPU_DEFAULTS`, which refuses what cannot work without a GPU.

    It leaves --yaml-cfg, which knows no defaults, to Megatron.
    """

    @functools.wraps(parse_args)
    def parse(
        extra_args_provider: Callable[..., Any] | None = None, ignore_unknown_args: bool = False
    ) -> argparse.Namespace:
        def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            set_cpu_defaults(parser)
            return extra_args_provider(parser) if extra_args_provider else parser

        args = parse_args(add_arguments, ignore_unknown_args)
        try:
            if args.yaml_cfg is None:
                check_cpu_arguments(args)
        except ValueError as error:
            sys.exit(f"megatron_burst: {error}")
        return args

    return parse


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
