"""What would be predicted wrongly, and is refused: by flags alone, and by their values."""

from megatron_burst.tools.flags import Flags, kept

_UNEVEN = "stages of as many layers alone are"
_WHOLE = "weights that tensor parallelism alone shares out are"
_REFUSED = {
    "account-for-embedding-in-pipeline-split": _UNEVEN,
    "account-for-loss-in-pipeline-split": _UNEVEN,
    "decoder-first-pipeline-num-layers": _UNEVEN,
    "decoder-last-pipeline-num-layers": _UNEVEN,
    "pipeline-model-parallel-layout": _UNEVEN,
    "use-torch-fsdp2": "when it gathers weights is not modelled",
    "fp4-format": "FP8 alone is",
    "attention-output-gate": "its gate is not counted",
    "fsdp-double-buffer": "it is one of the layers that are alike alone",
    "fp16": "only bfloat16 and float32 are",
    "experimental-attention-variant": "a layer of it has no plan; take a --hybrid-layer-pattern",
    "burst-block-mask": "its file would have to be of these sizes",
    "hybrid-override-pattern": "give it as --hybrid-layer-pattern",
    "heterogeneous-layers-config-path": "layers of one width alone are",
    "heterogeneous-layers-config-encoded-json": "layers of one width alone are",
    "cpu-offloading-num-layers": "what it moves is not counted",
    "fine-grained-activation-offloading": "what it moves is not counted",
    "moe-paged-stash": "what it moves is not counted",
    "window-attn-skip-freq": "layers with and without a window are not told apart",
    "moe-latent-size": "experts of another width are not counted",
    "moe-layer-recompute": "it is --recompute-granularity selective --recompute-modules moe",
    "moe-use-legacy-grouped-gemm": "grouped GEMM alone is",
    "fp8-param-gather": "weights of 16 bits alone are counted",
    "fp32-residual-connection": "hidden states as wide as weights alone are",
    "mtp-use-repeated-layer": "each of MTP's heads is counted with weights of its own",
    "tensor-parallel-num-weight-shards": _WHOLE,
    "expert-tensor-parallel-num-weight-shards": _WHOLE,
    "step-batch-size-schedule": "give the --global-batch-size of the step that is meant",
}
_MODELLED = {  # the values that can be predicted
    "recompute-method": ("uniform",),
    "recompute-granularity": ("full", "selective"),
    "data-parallel-sharding-strategy": ("optim_grads_params",),
    "num-distributed-optimizer-instances": ("1",),
    "optimizer": ("adam",),
    "exp-avg-dtype": ("fp32",),
    "exp-avg-sq-dtype": ("fp32",),
    "main-params-dtype": ("fp32",),
    "main-grads-dtype": ("fp32",),
    "megatron-fsdp-main-params-dtype": ("fp32",),
    "megatron-fsdp-main-grads-dtype": ("auto", "bf16"),  # the weights' own
}
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
MOMENTS = dict.fromkeys(("exp-avg-dtype", "exp-avg-sq-dtype"), tuple(BYTES))
_AWARE = {"main-grads-dtype": ("fp32", "bf16"), **MOMENTS}  # of --use-precision-aware-optimizer
_BESIDE_FSDP = {
    "optimizer-cpu-offload": "Megatron 0.19 copies gradients into whole tensors there, and these "
    "are sharded: its first step ends with an error",
    "pipeline-model-parallel-size": "when it gathers a stage's weights is not modelled",
    "use-nccl-ub": "its double buffers are not counted",
    "megatron-fsdp-max-pool-double-buffer": "they are not counted",
    "suggested-communication-unit-size": "it is counted to gather ahead as much as by default",
}


def refuse_unmodelled(given: Flags) -> None:
    """Raise ValueError for what would have to be predicted otherwise, or is missing."""
    # Attention and the MLP are layers of their own in a HybridModel.
    layers = "2" if "hybrid-layer-pattern" in given else "1"
    modelled = _MODELLED | (_AWARE if given.get("use-precision-aware-optimizer") else {})
    modelled |= {"recompute-num-layers": (layers,)}
    alone = {name: f"{' and '.join(values)} alone" for name, values in modelled.items()}
    for name, reason in (_REFUSED | alone).items():
        if given.get(name) and str(given[name]) not in modelled.get(name, ()):
            raise ValueError(f"--{name} {given[name]} cannot be predicted here: {reason}")
    for name, reason in _BESIDE_FSDP.items():
        if given.get("use-megatron-fsdp") and str(given.get(name, "1")) not in ("1", "False"):
            raise ValueError(f"--use-megatron-fsdp beside --{name} {given[name]}: {reason}")
    if "seq-length" not in kept(given):
        raise ValueError("--seq-length is missing")
