"""What Megatron's arguments have to be without a GPU: other defaults, and refusals."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_burst.plugin import compat
from megatron_burst.plugin.limits import with_remedies
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
_NO_GRAPHS, _LAYERS_OF_TE = "there are no CUDA graphs", "it asks for TransformerEngine's layers"
_OF_TE, _HERE = "it is TransformerEngine's", "memory is the CPU's already"
CPU_LIMITS = with_remedies(
    transformer_impl="TransformerEngine needs a GPU: pass --transformer-impl local",
    distributed_backend="NCCL needs a GPU: pass --distributed-backend gloo",
    fp8="FP8 kernels need a GPU: drop --fp8-format, use --bf16 or float32",
    cuda_graph_impl=_NO_GRAPHS,
    enable_cuda_graph=_NO_GRAPHS,
    external_cuda_graph=_NO_GRAPHS,
    optimizer_cuda_graph=_NO_GRAPHS,
    gradient_accumulation_fusion="its kernel is Apex's: pass --no-gradient-accumulation-fusion",
    masked_softmax_fusion="its kernel is Apex's: pass --no-masked-softmax-fusion",
    apply_rope_fusion="its kernel is TransformerEngine's: pass --no-rope-fusion",
    no_persist_layer_norm="its kernel is Apex's: pass --no-persist-layer-norm",
    nccl_ub="NCCL needs a GPU: drop --use-nccl-ub",
    use_sharp="NCCL needs a GPU",
    tp_comm_overlap=_OF_TE,
    cpu_offloading_num_layers=_HERE,
    fine_grained_activation_offloading=_HERE,
    optimizer_cpu_offload=_HERE,
    use_precision_aware_optimizer=_OF_TE,
    moe_permute_fusion=_OF_TE,
    moe_router_fusion=_OF_TE,
    moe_token_dispatcher_type="its kernels need a GPU: use alltoall",
    mla_down_proj_fusion=_OF_TE,
    batch_invariant_mode="its kernels are Triton's",
    mamba_training_ssm_states_dtype="the states are float32 here",
    nvtx_ranges="it marks ranges for CUDA's profiler",
    save_dgrads_interval=_LAYERS_OF_TE,
    save_activations_interval=_LAYERS_OF_TE,
    save_tokens_per_expert_interval=_LAYERS_OF_TE,
    moe_routing_trace_path="it copies by CUDA",
    record_memory_history="it records CUDA's allocator",
    gpu_sniff_test_interval="it times GPUs",
    high_priority_a2a_comm_stream="streams have no priorities",
    use_persistent_ckpt_worker="its process ends without a GPU, and saving waits for ever",
)


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
