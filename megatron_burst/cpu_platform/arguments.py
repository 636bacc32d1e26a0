"""What Megatron's arguments have to be without a GPU: other defaults, and refusals."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_burst.plugin import compat
from megatron_burst.plugin.refusals import broken_limits, refuse_all

CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    **compat.DEFAULTS_WITHOUT_TRANSFORMER_ENGINE,
    "use_cpu_initialization": True,
    # Written to be compiled; without a compiler torch's own operators are faster.
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    # Megatron-FSDP asks NCCL to scale what it sums.
    "gradient_reduce_div_fusion": False,
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


# What works is what is off, but for these.
_WORKING: Mapping[str, tuple[Any, ...]] = {
    "transformer_impl": ("local",),
    "distributed_backend": ("gloo",),
    "cuda_graph_impl": ("none",),
    "no_persist_layer_norm": (True,),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
}
CPU_LIMITS: Mapping[str, str] = {
    "transformer_impl": "TransformerEngine needs a GPU: --transformer-impl local",
    "distributed_backend": "NCCL needs a GPU: --distributed-backend gloo",
    "fp8": "FP8 kernels need a GPU: drop --fp8-format, use --bf16 or float32",
    "fp4": "FP4 kernels need a GPU: drop --fp4-format, use --bf16 or float32",
    "cuda_graph_impl": "there are no CUDA graphs: drop --cuda-graph-impl",
    "enable_cuda_graph": "there are no CUDA graphs: drop --enable-cuda-graph",
    "external_cuda_graph": "there are no CUDA graphs: drop --external-cuda-graph",
    "optimizer_cuda_graph": "there are no CUDA graphs: drop --optimizer-cuda-graph",
    "gradient_accumulation_fusion": "pass --no-gradient-accumulation-fusion",
    "masked_softmax_fusion": "pass --no-masked-softmax-fusion",
    "apply_rope_fusion": "pass --no-rope-fusion",
    "no_persist_layer_norm": "pass --no-persist-layer-norm",
    "tp_comm_overlap": "it is TransformerEngine's: drop --tp-comm-overlap",
    "nccl_ub": "drop --use-nccl-ub",
    "use_sharp": "drop --use-sharp",
    "cpu_offloading_num_layers": "memory is the CPU's already: drop it",
    "fine_grained_activation_offloading": "memory is the CPU's already: drop it",
    "optimizer_cpu_offload": "the optimizer runs on the CPU already: drop it",
    "use_precision_aware_optimizer": "it is TransformerEngine's optimizer: drop it",
    "moe_permute_fusion": "it is TransformerEngine's: drop --moe-permute-fusion",
    "moe_router_fusion": "it is TransformerEngine's: drop --moe-router-fusion",
    "moe_token_dispatcher_type": "use alltoall",
    "mla_down_proj_fusion": "it is TransformerEngine's: drop --mla-down-proj-fusion",
    "batch_invariant_mode": "its kernels are Triton's: drop --batch-invariant-mode",
    "mamba_training_ssm_states_dtype": (
        "the states are float32 here: drop --mamba-training-ssm-states-dtype"
    ),
    "nvtx_ranges": "it marks ranges for CUDA's profiler: drop --nvtx-ranges",
    "save_dgrads_interval": "it asks for TransformerEngine's layers: drop --save-dgrads-interval",
    "save_activations_interval": (
        "it asks for TransformerEngine's layers: drop --save-activations-interval"
    ),
    "save_tokens_per_expert_interval": (
        "it asks for TransformerEngine's layers: drop --save-tokens-per-expert-interval"
    ),
    "moe_routing_trace_path": "it copies by CUDA: drop --moe-routing-trace-path",
    "record_memory_history": "it records CUDA's allocator: drop it",
    "gpu_sniff_test_interval": "it times GPUs: drop --gpu-sniff-test-interval",
    "high_priority_a2a_comm_stream": (
        "streams have no priorities: drop --high-priority-a2a-comm-stream"
    ),
    "use_persistent_ckpt_worker": (
        "its process ends without a GPU, and saving waits for ever: drop "
        "--use-persistent-ckpt-worker"
    ),
}


def check_cpu_arguments(args: argparse.Namespace) -> None:
    """ValueError naming every argument that cannot work without a GPU and what to use instead.

    --yaml-cfg, which knows no defaults, is left to Megatron.
    """
    if args.yaml_cfg is not None:
        return
    reasons = broken_limits(CPU_LIMITS, args, _WORKING)
    if args.profile and not args.use_pytorch_profiler:
        reasons.append("--profile starts CUDA's profiler: add --use-pytorch-profiler")
    if args.fp32_residual_connection and (args.bf16 or args.fp16):
        reasons.append("torch's norms take one dtype: drop --fp32-residual-connection")
    refuse_all("this cannot run on a CPU", reasons)
