"""What of Megatron our parts cannot honour, each with the reason: refused, never ignored."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_burst.config import Algorithm, LayoutName

MEGATRON = "megatron"  # the value of --context-parallel-algo that leaves attention to Megatron

# What --cuda-graph-modules may name while attention stays out of the graphs. For mlp and moe
# Megatron's own implementation captures whole layers.
_GRAPHS_BESIDE_ATTENTION = {
    "local": ("moe_router", "moe_preprocess", "mamba"),
    "transformer_engine": ("mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
}

# What Megatron reads them as once it has validated its arguments.
_DEPRECATED_GRAPHS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}


def with_remedies(**reasons: str) -> dict[str, str]:
    """Return limits, arguments of Megatron and why they have to be off; to drop one is the remedy.

    Unless a reason has a remedy of its own behind a colon.
    """
    return {
        name: reason if ": " in reason else f"{reason}: drop --{name.replace('_', '-')}"
        for name, reason in reasons.items()
    }


# An argument of Megatron (or field of TransformerConfig) has to be one of the first, unless it is
# named below.
OFF: tuple[Any, ...] = (None, False, 0, "")
WORKING: Mapping[str, tuple[Any, ...]] = {
    "attention_backend": (None, "auto"),
    "cp_partition_mode": (None, "zigzag"),
    "cuda_graph_impl": (None, "none", "local", "transformer_engine"),
    "experimental_attention_variant": (None, "gated_delta_net"),
}

# Of our attention.
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
        "Megatron 0.19 and main end in get_batch with it, and would rotate by the static group"
    ),
    hybrid_override_pattern=(
        "--hybrid-override-pattern is deprecated: pass --hybrid-layer-pattern"
    ),
    modelopt_enabled=(
        "ModelOpt builds its model without our layer spec: drop its flags (modelopt_enabled)"
    ),
    qk_clip="it needs the largest score of a row",
    log_max_attention_logit="it needs the largest score of a row",
    fp8_dot_product_attention=(
        "attention runs in the model's dtype: leave fp8_dot_product_attention off"
    ),
    fp8_multi_head_attention=(
        "attention runs in the model's dtype: leave fp8_multi_head_attention off"
    ),
    cuda_graph_impl=(
        "a ring cannot be captured in a CUDA graph: drop --cuda-graph-impl full_iteration, or take "
        "transformer_engine or local with --cuda-graph-modules that hold no attention"
    ),
    overlap_moe_expert_parallel_comm=(
        "its schedule splits layers in a way that was not shown to be right"
    ),
    batch_invariant_mode="Megatron does not run it with context parallelism",
    use_kitchen_attention="it is another core attention: leave use_kitchen_attention off",
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
)

# Of our attention, arguments that dev alone has, Megatron's branch of what will come.
DEV_LIMITS = with_remedies(
    dynamic_context_parallel="every micro-batch would have process groups of its own",
    sequence_packing_scheduler="it deals out tokens by itself, in an order that ours is not told",
    cp_partition_mode=(
        "our layouts begin from zigzag: drop --cp-partition-mode contiguous, or take "
        "--burst-layout balanced"
    ),
    use_varlen_dataset="it was not shown to be right: drop --use-varlen-dataset, or take --sft",
    rotary_base_per_layer=(
        "its embeddings take the rows of a rank for a whole sequence: drop --rotary-base-per-layer"
    ),
)

# Of sending the latents of multi-latent attention; K and V can always be sent.
LATENT_LIMITS = with_remedies(
    fp8="the up-projection of visitors runs in the model's dtype: drop --fp8-format",
    fp4="the up-projection of visitors runs in the model's dtype: drop --fp4-format",
    delay_wgrad_compute="its late gradients are written over what visitors add",
    use_megatron_fsdp="it was not shown to be right with weights that FSDP shards",
    use_torch_fsdp2="it was not shown to be right with weights that FSDP shards",
)

# Of the chunked LM head and loss.
LM_HEAD_LIMITS = with_remedies(
    logits_save_dir="it saves logits, which never exist",
    logits_load_dir="it compares logits, which never exist",
    logit_dtype=(
        "logits of a chunk have a dtype of their own (logit_dtype): drop --output-logit-dtype"
    ),
    config_logger_dir="it writes logits, which never exist",
    modelopt_enabled=(
        "ModelOpt distils from logits, which never exist: drop ModelOpt's flags (modelopt_enabled)"
    ),
    cross_entropy_loss_fusion="it chooses among Megatron's own losses",
    overlap_moe_expert_parallel_comm="its schedule plan calls the output layer by itself",
    defer_embedding_wgrad_compute="it keeps the gradients of all logits of a batch",
    cuda_graph_impl=(
        "it was not shown to be right in a graph of a whole iteration: drop --cuda-graph-impl "
        "full_iteration"
    ),
    batch_invariant_mode="chunks are other shapes than Megatron's",
    save_activations_interval="it saves logits, which never exist",
    save_dgrads_interval="the output layer hands on no tensor whose gradient could be saved",
    perform_rl_step=(
        "its losses are made of logits, outside the model: take --lm-head-loss megatron with "
        "--perform-rl-step"
    ),
)

# Of MLPs in chunks.
MLP_LIMITS = with_remedies(
    fp8="chunks were not shown to be right with scales that a whole tensor shares",
    fp4="chunks were not shown to be right with scales that a whole tensor shares",
    delay_wgrad_compute="gradients of weights come behind the chunks that sum them",
    tp_comm_overlap="its buffers are made for all tokens of a rank",
    use_transformer_engine_op_fuser="that MLP has no forward that takes part of the tokens",
    overlap_moe_expert_parallel_comm="its schedule runs the parts of a layer by itself",
    cuda_graph_impl="chunks were not shown to be right in a graph",
    moe_shared_expert_overlap="shared experts run in parts there, which chunks would not see",
    mlp_chunks_for_training=(
        "it holds all chunks until the backward: drop --mlp-chunks-for-training, "
        "--mlp-chunks does its work"
    ),
)
MLP_WORKING: Mapping[str, tuple[Any, ...]] = {
    "cuda_graph_impl": (None, "none"),
    "mlp_chunks_for_training": (None, 1),
}

# Of any of our flags, where Megatron itself fails beside the weights that it shards.
SHARDING_LIMITS = {
    "use_megatron_fsdp": with_remedies(
        optimizer_cpu_offload=(
            "Megatron copies gradients into whole tensors there, which --use-megatron-fsdp shards, "
            "and its first step ends with an error: drop one of them"
        )
    ),
    "use_torch_fsdp2": with_remedies(
        calculate_per_token_loss=(
            "Megatron scales no gradient under --use-torch-fsdp2, which are then larger by the "
            "number of tokens: drop --calculate-per-token-loss, or take --use-megatron-fsdp"
        )
    ),
}


def refuse_all(what: str, reasons: Iterable[str]) -> None:
    """Raise a ValueError that says what cannot be done and every reason, if there is one."""
    if lines := [*reasons]:
        raise ValueError("\n  ".join([f"{what}:", *lines]))


def refusals(settings: Any) -> list[str]:
    """Return why our attention cannot run with these settings, one line each; empty if it can.

    Args:
        settings: Megatron's parsed arguments or a TransformerConfig. A limit whose name it does
            not have does not apply to it.
    """
    pattern = layer_pattern(settings)
    layout = getattr(settings, "burst_layout", LayoutName.ZIGZAG)
    checks = (
        _graph_refusals,
        _window_refusals,
        _document_refusals,
        _rotary_refusals,
        _mtp_refusals,
    )
    others = (reason for check in checks for reason in check(settings))
    return [
        *beyond({**LIMITS, **DEV_LIMITS}, settings),
        *others,
        *pattern_refusals(pattern, layout, settings),
    ]


def lm_head_refusals(args: Any) -> list[str]:
    """Return why the chunked loss cannot run with Megatron's parsed arguments, one line each."""
    documents = documents_flag(args)
    ranks, name = args.context_parallel_size, getattr(args, "context_parallel_algo", None)
    reasons = beyond(LM_HEAD_LIMITS, args)
    if args.mtp_num_layers and documents and ranks > 1 and name == MEGATRON:
        reasons.append(
            f"mtp_num_layers = {args.mtp_num_layers}, {documents} = True: over {ranks} "
            "context-parallel ranks Megatron's attention leaves tokens where MTP's losses cannot "
            f"the next: take --context-parallel-algo {Algorithm.BURST}, or drop one of them"
        )
    return reasons


def sharding_refusals(args: Any) -> Iterator[str]:
    """Yield why none of our flags can run beside the weights that Megatron shards."""
    for flag, limits in SHARDING_LIMITS.items():
        if getattr(args, flag, False):
            yield from beyond(limits, args)


def documents_flag(args: Any) -> str | None:
    """Name the argument that brings documents, if one does."""
    names = "dataloader_inter_document_masking", "sft"
    return next((name for name in names if getattr(args, name, False)), None)


def pattern_refusals(pattern: str | None, layout: str, settings: Any) -> Iterator[str]:
    """Yield why layers of a hybrid layer pattern cannot run beside ours; see `refusals`."""
    pattern = pattern or ""
    if sparse := " ".join(sorted({*pattern} & {*"DCHW"})):  # the last three are dev's
        yield (
            f"{sparse} in the pattern {pattern}: DeepSeek sparse attention is another core "
            "attention: take + (MLA) layers, or drop --context-parallel-algo"
        )
    if "" in pattern.partition("/")[0].split("|")[1:-1]:
        yield (
            f"a stage without layers in the pattern {pattern}: Megatron frees what it passes on, "
            "and gradients of the stages before it are wrong: give it a layer, or drop its |"
        )
    found = recurrent_layers(pattern)
    if layout != LayoutName.ZIGZAG and found:
        yield (
            f"{found} layers undo Megatron's zigzag by themselves and know no other order: "
            f"drop --burst-layout {layout}"
        )
    ranks = getattr(settings, "tensor_model_parallel_size", 1)
    if "G" in pattern and ranks > 1 and not settings.sequence_parallel:
        yield (
            f"G (gated delta net) over {ranks} tensor-parallel ranks: Megatron sums the gradient "
            "of its norm over them under sequence parallelism alone: add --sequence-parallel"
        )


def layer_pattern(settings: Any) -> str | None:
    """Return the pattern of a hybrid model's layers; "G" for a GPTModel that has such among its."""
    pattern: str | None = getattr(settings, "hybrid_layer_pattern", None)
    variant = getattr(settings, "experimental_attention_variant", None)
    return "G" if variant == "gated_delta_net" else pattern


def recurrent_layers(pattern: str | None) -> str:
    """Name the layers of a hybrid layer pattern that carry a state from token to token, if any."""
    named = {"M": "M (Mamba)", "G": "G (gated delta net)"}
    return " and ".join(name for symbol, name in named.items() if symbol in (pattern or ""))


def beyond(
    limits: Mapping[str, str],
    settings: Any,
    working: Mapping[str, tuple[Any, ...]] = WORKING,
) -> list[str]:
    """Return the limits that `settings` do not keep: the name, the value and the reason."""
    given = {name: getattr(settings, name, None) for name in limits}
    plain = {name: getattr(value, "name", value) for name, value in given.items()}  # of enums
    return [
        f"{name} = {value}: {limits[name]}"
        for name, value in plain.items()
        if value is not None and value not in working.get(name, OFF)
    ]


def _graph_refusals(settings: Any) -> Iterator[str]:
    """Per-layer CUDA graphs may hold anything but attention; no module named is the whole layer."""
    impl = getattr(settings, "cuda_graph_impl", None)
    for flag, meant in _DEPRECATED_GRAPHS.items():
        impl = meant if getattr(settings, flag, False) else impl
    if impl not in _GRAPHS_BESIDE_ATTENTION:
        return
    # Until Megatron has validated its arguments, those of --cuda-graph-scope have their own place.
    modules = getattr(settings, "cuda_graph_modules", None) or getattr(
        settings, "cuda_graph_scope_deprecated", None
    )
    named = [getattr(module, "name", module) for module in modules or ()]
    fine = _GRAPHS_BESIDE_ATTENTION[impl]
    if not named or not set(named) <= set(fine):
        yield (
            f"cuda_graph_modules = {' '.join(named) or 'none, the whole layer'}: a ring cannot be "
            f"captured in a CUDA graph; with --cuda-graph-impl {impl} name some of "
            f"{', '.join(fine)} in --cuda-graph-modules and no others, or drop --cuda-graph-impl"
        )


def _window_refusals(settings: Any) -> Iterator[str]:
    """Megatron's (left, right): how many keys before and behind it a query sees; -1 is all."""
    window = getattr(settings, "window_size", None)
    if window and (len(window) != 2 or window[0] < -1):
        yield f"window_size = {window}: pass --window-size LEFT,0 with LEFT >= 0, or -1 for all"
    elif window and window[1] not in (0, -1):
        yield (
            f"window_size = {window}: under a causal mask no query sees what is behind it: "
            f"pass --window-size {window[0]},0"
        )


def _document_refusals(args: Any) -> Iterator[str]:
    """Recurrent layers, the layout of --sft, and samples that have to be told apart on one rank."""
    name = documents_flag(args)
    if name is None:
        return
    found = recurrent_layers(layer_pattern(args))
    layout = getattr(args, "burst_layout", "zigzag")
    if found and name == "sft":
        yield f"sft = True: {found} layers were not shown to be right with it: drop --sft"
    elif found:
        yield (
            f"{name} = True: {found} layers take every document in a zigzag of its own, and there "
            "is one of the whole sequence: drop --dataloader-inter-document-masking"
        )
    elif getattr(args, "sft", False) and layout != "zigzag" and args.context_parallel_size > 1:
        yield (
            "sft = True: every document is in a zigzag of its own already, which gives the ranks "
            f"equal work: drop --burst-layout {layout}"
        )
    ranks = args.context_parallel_size
    ranks *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    balancing = args.moe_router_load_balancing_type
    by_sample = "seq_aux_loss" in (balancing if isinstance(balancing, list) else [balancing])
    if args.num_experts and by_sample and args.micro_batch_size != 1 and ranks > 1:
        yield (
            f"{name} = True: the samples of a micro-batch are one sequence over {ranks} ranks, "
            "which cannot tell them apart for seq_aux_loss: "
            f"pass --micro-batch-size 1 instead of {args.micro_batch_size}"
        )


def _rotary_refusals(args: Any) -> Iterator[str]:
    """Embeddings whose rows cannot be taken one by one, where tokens leave Megatron's order."""
    layout = getattr(args, "burst_layout", LayoutName.ZIGZAG)
    why = documents_flag(args) or (layout != LayoutName.ZIGZAG and f"--burst-layout {layout}")
    if not why:
        return
    kind = getattr(args, "position_embedding_type", None)
    if kind == "mrope":
        yield f"position_embedding_type = mrope: it cannot follow {why}: drop one of them"
    fuses = getattr(args, "multi_latent_attention", False) and args.apply_rope_fusion
    # Without rope Megatron switches the fusion off by itself.
    if fuses and (kind == "rope" or args.use_rotary_position_embeddings):
        yield f"apply_rope_fusion = True: MLA's cannot follow {why}: pass --no-rope-fusion"


def _mtp_refusals(args: Any) -> Iterator[str]:
    """Megatron moves hidden states from rank to rank without their gradients."""
    variant = getattr(args, "experimental_attention_variant", None)
    if variant and getattr(args, "mtp_num_layers", None):
        yield (
            f"mtp_num_layers = {args.mtp_num_layers}: a GPTModel of Megatron's has no MTP beside "
            f"{variant}: take --hybrid-layer-pattern, or drop --mtp-num-layers"
        )
    ranks = getattr(args, "context_parallel_size", 1)
    mixes = getattr(args, "mtp_num_layers", None) and getattr(args, "mtp_hsm", False)  # of main
    if mixes and ranks > 1:
        yield (
            f"mtp_hsm = True: over {ranks} context-parallel ranks Megatron mixes other hidden "
            "states, and no gradient crosses the borders of chunks: drop --mtp-hsm"
        )
