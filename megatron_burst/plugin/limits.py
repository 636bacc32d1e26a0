"""What of Megatron our parts cannot honour, each with the reason: refused, never ignored."""

from collections.abc import Mapping
from typing import Any

MEGATRON = "megatron"  # the value of --context-parallel-algo that leaves attention to Megatron


_WITHOUT_FLAG = (
    "fp8_dot_product_attention fp8_multi_head_attention use_kitchen_attention quant_recipe"
).split()


def flag_of(argument: str) -> str:
    """Return the flag of Megatron that sets an argument."""
    return f"--{argument.replace('_', '-')}" + "-format" * (argument in ("fp8", "fp4"))


def _remedy(name: str) -> str:
    return f"leave {name} off" if name in _WITHOUT_FLAG else f"drop {flag_of(name)}"


def with_remedies(**reasons: str) -> dict[str, str]:
    """Return limits, arguments of Megatron and why they have to be off; to drop one is the remedy.

    Unless a reason has a remedy of its own behind a colon.
    """
    return {n: why if ": " in why else f"{why}: {_remedy(n)}" for n, why in reasons.items()}


# An argument of Megatron (or field of TransformerConfig) has to be one of the first, unless it is
# named below.
OFF: tuple[Any, ...] = (None, False, 0, "")
GATED_DELTA_NETS = ("gated_delta_net", "gdn")  # as a GPTModel's variant; main renames the first
WORKING: Mapping[str, tuple[Any, ...]] = {
    "attention_backend": (None, "auto"),
    "cp_partition_mode": (None, "zigzag"),
    "attention_cp_layout": (None, "zigzag"),
    "linear_cp_layout": (None, "zigzag"),
    "cuda_graph_impl": (None, "none", "local", "transformer_engine"),
    "experimental_attention_variant": (None, *GATED_DELTA_NETS),
}

# Of our attention. With --hybrid-context-parallel `HybridCPDataLoaderWrapper.unpack_batch` (0.19.2,
# main d98e8a64) hands on tokens [t] without cu_seqlens: `get_batch_on_this_tp_rank` fails, and
# `get_batch_on_this_cp_rank` would cut by the group of the model.
LIMITS = with_remedies(
    attention_dropout=(
        "a kernel's random numbers are local to a tile, so no CP size would equal another: pass "
        "--attention-dropout 0"
    ),
    experimental_attention_variant="of these gated_delta_net alone runs beside our attention",
    reset_attention_mask=(
        "it needs the dense mask, which is never built: drop --reset-attention-mask, and take "
        "--dataloader-inter-document-masking"
    ),
    hybrid_context_parallel=(
        "Megatron (0.19, main d98e8a64) asks tokens [t] for shape[1] in get_batch_on_this_tp_rank: "
        "drop --hybrid-context-parallel, or pass a cp_group yourself"
    ),
    cache_mla_latents="Megatron's layer asserts that it does not train",
    hybrid_override_pattern="it is deprecated: pass --hybrid-layer-pattern",
    modelopt_enabled=(
        "ModelOpt builds its model without our layer spec: drop its flags (modelopt_enabled)"
    ),
    log_max_attention_logit=(
        "no kernel returns the largest score, and to find it costs a seventh of attention's FLOPs"
    ),
    fp8_dot_product_attention="attention runs in the model's dtype",
    fp8_multi_head_attention="attention runs in the model's dtype",
    cuda_graph_impl=(
        "a ring cannot be captured in a CUDA graph: drop --cuda-graph-impl full_iteration, or take "
        "transformer_engine or local with --cuda-graph-modules that hold no attention"
    ),
    batch_invariant_mode="Megatron does not run it with context parallelism",
    use_kitchen_attention="it is another core attention",
    attention_backend=(
        "it chooses among Megatron's own kernels: drop --attention-backend, or choose with "
        "--burst-kernel"
    ),
    flash_attention_version=(
        "it chooses among Megatron's own kernels: drop --flash-attention-version, or choose with "
        "--burst-kernel"
    ),
    inprocess_restart=(
        "groups of ours are made once a model is configured, and would outlive Megatron's: "
        "drop --inprocess-restart"
    ),
    fake_process_group="a ring waits for ranks that are not there",
    perform_rl_step="our attention generates no tokens",
)

# Of our attention, arguments that dev alone has, Megatron's branch of what will come. Dynamic
# context parallelism implies a scheduler, for which its config wants TransformerEngine 2.9;
# what `get_batch_on_this_rank_for_sequence_packing` makes is THD, each document in zigzag.
DEV_LIMITS = with_remedies(
    dynamic_context_parallel=(
        "Megatron (dev d48bd6be) wants TransformerEngine 2.9, with which it was not tried: drop "
        "--dynamic-context-parallel, or pass a cp_group yourself"
    ),
    sequence_packing_scheduler=(
        "Megatron (dev d48bd6be) wants TransformerEngine 2.9, with which it was not tried"
    ),
    cp_partition_mode=(
        "our layouts begin from zigzag: drop --cp-partition-mode contiguous, or take "
        "--burst-layout balanced"
    ),
    attention_cp_layout="our layouts begin from zigzag",
    linear_cp_layout="our layouts begin from zigzag",
    use_varlen_dataset="it was not shown to be right: drop --use-varlen-dataset, or take --sft",
    rotary_base_per_layer="its embeddings take the rows of a rank for a whole sequence",
)


def _narrow(reason: str) -> dict[str, str]:
    """Return what runs linear layers in FP8 or FP4; a recipe does so by layer, without fp8."""
    return dict.fromkeys(("fp8", "fp4", "te_precision_config_file", "quant_recipe"), reason)


# Of sending the latents of multi-latent attention; K and V can always be sent.
LATENT_LIMITS = with_remedies(
    **_narrow("K and V are made of received latents in the model's dtype"),
    delay_wgrad_compute="its late gradients are written over what received latents add",
    save_dgrads_interval="Megatron would write those of this rank's queries alone",
    use_megatron_fsdp="it was not shown to be right with weights that FSDP shards",
    use_torch_fsdp2="it was not shown to be right with weights that FSDP shards",
)

# Of the chunked LM head and loss.
LM_HEAD_LIMITS = with_remedies(
    logits_save_dir="it needs logits, which never exist",
    logits_load_dir="it needs logits, which never exist",
    logit_dtype=(
        "logits of a chunk have a dtype of their own (logit_dtype): drop --output-logit-dtype"
    ),
    config_logger_dir="it needs logits, which never exist",
    modelopt_enabled=(
        "ModelOpt distils from logits, which never exist: drop ModelOpt's flags (modelopt_enabled)"
    ),
    fp8_output_proj="the output layer is TransformerEngine's then",
    cross_entropy_loss_fusion="it chooses among Megatron's own losses",
    fp16_lm_cross_entropy="it chooses among Megatron's own losses",
    defer_embedding_wgrad_compute="it keeps the gradients of all logits of a batch",
    cuda_graph_impl=(
        "it was not shown to be right in a graph of a whole iteration: drop --cuda-graph-impl "
        "full_iteration"
    ),
    batch_invariant_mode="chunks are other shapes than Megatron's",
    save_activations_interval="it needs logits, which never exist",
    save_dgrads_interval="the output layer hands on no tensor whose gradient could be saved",
    perform_rl_step="it needs logits: take --lm-head-loss megatron with --perform-rl-step",
)

# Of MLPs in chunks.
MLP_LIMITS = with_remedies(
    **_narrow("chunks were not shown to be right with scales that a whole tensor shares"),
    delay_wgrad_compute="gradients of weights come behind the chunks that sum them",
    tp_comm_overlap="its buffers are made for all tokens of a rank",
    use_transformer_engine_op_fuser="that MLP has no forward that takes part of the tokens",
    cuda_graph_impl="chunks were not shown to be right in a graph",
    moe_shared_expert_overlap="shared experts run in parts there, which chunks would not see",
    save_activations_interval="Megatron would write those of the last chunk alone",
    save_dgrads_interval="Megatron would write those of the last chunk alone",
    gtp_weight_remat_size=(
        "it gathers weights once a forward: drop --tensor-parallel-num-weight-shards"
    ),
    mlp_chunks_for_training=(
        "it holds all chunks until the backward: drop --mlp-chunks-for-training, "
        "--mlp-chunks does its work"
    ),
)
MLP_WORKING: Mapping[str, tuple[Any, ...]] = {
    "cuda_graph_impl": (None, "none"),
    "gtp_weight_remat_size": (None, 1),
    "mlp_chunks_for_training": (None, 1),
}
