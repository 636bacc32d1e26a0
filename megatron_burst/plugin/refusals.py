"""What arguments of Megatron ask for that our parts cannot honour, by the tables of limits."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_burst.config import ZIGZAGS, Algorithm, LayoutName
from megatron_burst.plugin.limits import (
    DEV_LIMITS,
    GATED_DELTA_NETS,
    LIMITS,
    LM_HEAD_LIMITS,
    MEGATRON,
    OFF,
    WORKING,
)

# What --cuda-graph-modules may name while attention stays out of the graphs. For mlp and moe
# Megatron's own implementation captures whole layers.
_GRAPHS_BESIDE_ATTENTION = {
    "local": ("moe_router", "moe_preprocess", "mamba"),
    "transformer_engine": ("mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
}

# What Megatron reads them as once it has validated its arguments.
_DEPRECATED_GRAPHS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}


def refuse_all(what: str, reasons: Iterable[str]) -> None:
    """Raise a ValueError that says what cannot be done and every reason, if there is one."""
    if lines := [*reasons]:
        raise ValueError("\n  ".join([f"{what}:", *lines]))


def ranks_refusal(
    ranks: int, tensor: int, pipeline: int, context: int, flag: str = "--nproc-per-node"
) -> str:
    """Say why models over such parallel sizes cannot share so many ranks; "" if they can."""
    size = tensor * pipeline * context
    if size < 1 or ranks % size == 0:  # Megatron refuses sizes below 1
        return ""
    return (
        f"{ranks} ranks do not divide over --tensor-model-parallel-size {tensor} x "
        f"--pipeline-model-parallel-size {pipeline} x --context-parallel-size {context} = {size}: "
        f"change {flag} or one of them"
    )


def refusals(settings: Any) -> list[str]:
    """Return why our attention cannot run with these settings, one line each; empty if it can.

    Args:
        settings: Megatron's parsed arguments or a TransformerConfig. A limit whose name it does
            not have does not apply to it.
    """
    checks = (
        _graph_refusals,
        _window_refusals,
        _document_refusals,
        _rotary_refusals,
        _logit_file_refusals,
        _mtp_refusals,
    )
    others = (reason for check in checks for reason in check(settings))
    return [
        *broken_limits({**LIMITS, **DEV_LIMITS}, settings),
        *others,
        *pattern_refusals(layer_pattern(settings), settings),
    ]


def lm_head_refusals(args: Any) -> list[str]:
    """Return why the chunked loss cannot run with Megatron's parsed arguments, one line each."""
    documents = documents_flag(args)
    ranks, name = args.context_parallel_size, getattr(args, "context_parallel_algo", None)
    reasons = broken_limits(LM_HEAD_LIMITS, args)
    if args.mtp_num_layers and documents and ranks > 1 and name == MEGATRON:
        reasons.append(
            f"mtp_num_layers = {args.mtp_num_layers}, {documents} = True: over {ranks} "
            "context-parallel ranks Megatron's attention leaves tokens where MTP's losses cannot "
            f"the next: take --context-parallel-algo {Algorithm.BURST}, or drop one of them"
        )
    return reasons


def sharding_refusals(args: Any) -> Iterator[str]:
    """Yield what Megatron does wrong with weights that it shards, and state that it cannot load."""
    if args.use_megatron_fsdp:
        yield from _fsdp_refusals(args)
    is_fsdp2 = getattr(args, "use_torch_fsdp2", False)
    if is_fsdp2 and args.calculate_per_token_loss:
        yield (
            "calculate_per_token_loss = True: Megatron scales no gradient under --use-torch-fsdp2, "
            "which are then larger by the number of tokens: drop --calculate-per-token-loss, or "
            "take --use-megatron-fsdp"
        )
    shards = args.use_megatron_fsdp and "grads" in args.data_parallel_sharding_strategy
    repeats = args.mtp_use_repeated_layer and args.recompute_method == "uniform"
    if repeats and (shards or is_fsdp2):
        yield (
            "mtp_use_repeated_layer = True: under full recompute FSDP, Megatron's or torch's, sums "
            "gradients of that layer wrongly: take --recompute-method block, or drop one of them"
        )
    resumes = args.load and not (args.no_load_optim or args.finetune or args.skip_train)
    if resumes and args.optimizer == "sgd" and args.ckpt_format == "torch_dist":
        yield (
            "optimizer = sgd: Megatron loads no momentum of torch_dist, and ends with a TypeError: "
            "add --no-load-optim, or take --ckpt-format torch"
        )
    if is_fsdp2 and resumes:
        yield (
            "use_torch_fsdp2 = True: Megatron loads no step of Adam: torch's ends with a KeyError, "
            "others count from 1 again: add --no-load-optim, or take --use-megatron-fsdp"
        )
    if args.ckpt_format == "torch_dcp" and (args.save or args.load):
        yield (
            "ckpt_format = torch_dcp: Megatron (0.19, main d98e8a64) can save but not load it, its "
            "optimizer knows no is_loading: take --ckpt-format torch_dist"
        )


def _fsdp_refusals(args: Any) -> Iterator[str]:
    """What Megatron-FSDP (0.19) fails in or does wrong, beside Megatron's own attention, too."""
    if args.optimizer_cpu_offload:
        yield (
            "optimizer_cpu_offload = True: Megatron copies gradients into whole tensors there, "
            "which --use-megatron-fsdp shards, and its first step ends with an error: drop one of "
            "them"
        )
    if args.swiglu and args.save and not (args.bf16 or args.fp16):
        yield (
            "use_megatron_fsdp = True, swiglu = True: Megatron cannot save them in float32, its "
            "first save ends with an error: add --bf16, or drop --save or one of them"
        )
    if args.fp16:
        yield (
            "fp16 = True: Megatron-FSDP's first step ends with an error where a rank has no part "
            "of a weight: take --bf16, or drop one of them"
        )
    if (stages := args.pipeline_model_parallel_size) > 1:
        yield (
            f"pipeline_model_parallel_size = {stages}: Megatron-FSDP's meshes are of all ranks, "
            "and know no stages: drop one of them"
        )
    instances, strategy = args.num_distributed_optimizer_instances, args.outer_dp_sharding_strategy
    if instances > 1 and not args.overlap_grad_reduce:
        yield (
            f"num_distributed_optimizer_instances = {instances}: Megatron-FSDP sums no gradients "
            "between them: add --overlap-grad-reduce, or drop it"
        )
    if instances > 1 and strategy != "no_shard":
        yield (
            f"outer_dp_sharding_strategy = {strategy}: Megatron clips gradients by the norm of one "
            "instance's: drop --outer-dp-sharding-strategy"
        )


def documents_flag(args: Any) -> str | None:
    """Name the argument that brings documents, if one does."""
    names = "dataloader_inter_document_masking", "sft"
    return next((name for name in names if getattr(args, name, False)), None)


def pattern_refusals(pattern: str | None, settings: Any) -> Iterator[str]:
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
    return "G" if variant in GATED_DELTA_NETS and not pattern else pattern


def _runs_plans(settings: Any) -> bool:
    """Whether Megatron trains by `build_schedule_plan` and not by a model's forward."""
    return bool(getattr(settings, "overlap_moe_expert_parallel_comm", False))


def recurrent_layers(pattern: str | None) -> str:
    """Name the layers of a hybrid layer pattern that carry a state from token to token, if any."""
    named = {"M": "M (Mamba)", "G": "G (gated delta net)"}
    return " and ".join(name for symbol, name in named.items() if symbol in (pattern or ""))


def broken_limits(
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
    layout, ranks = getattr(args, "burst_layout", LayoutName.ZIGZAG), args.context_parallel_size
    if name == "sft" and ranks > 1 and layout not in (*ZIGZAGS, LayoutName.CONTIGUOUS):
        yield (
            "sft = True: every document is in a zigzag of its own already, which gives the ranks "
            f"equal work: drop --burst-layout {layout}"
        )
    ranks *= args.tensor_model_parallel_size if args.sequence_parallel else 1
    balancing = args.moe_router_load_balancing_type
    by_sample = "seq_aux_loss" in (balancing if isinstance(balancing, list) else [balancing])
    where = f"over {ranks} ranks, which" if ranks > 1 else "in a schedule plan, which"
    as_one = ranks > 1 or _runs_plans(args)
    if args.num_experts and by_sample and args.micro_batch_size != 1 and as_one:
        yield (
            f"{name} = True: the samples of a micro-batch are one sequence {where} cannot tell "
            "them apart for seq_aux_loss: "
            f"pass --micro-batch-size 1 instead of {args.micro_batch_size}"
        )


def _rotary_refusals(args: Any) -> Iterator[str]:
    """Embeddings whose rows cannot be taken one by one, where tokens leave Megatron's order."""
    layout = getattr(args, "burst_layout", LayoutName.ZIGZAG)
    why = documents_flag(args) or (layout not in ZIGZAGS and f"--burst-layout {layout}")
    if why:
        yield from cannot_follow(args, why)


def cannot_follow(args: Any, why: str) -> Iterator[str]:
    """Yield the embeddings that cannot follow tokens to where `why` has them."""
    kind = getattr(args, "position_embedding_type", None)
    if kind == "mrope":
        yield f"position_embedding_type = mrope: it cannot follow {why}: drop one of them"
    fuses = getattr(args, "multi_latent_attention", False) and args.apply_rope_fusion
    # Without rope Megatron switches the fusion off by itself.
    if fuses and (kind == "rope" or args.use_rotary_position_embeddings):
        yield f"apply_rope_fusion = True: MLA's cannot follow {why}: pass --no-rope-fusion"


def _logit_file_refusals(args: Any) -> Iterator[str]:
    """Files of logits for distillation, which are read by rank and row, whoever wrote them."""
    layout = getattr(args, "burst_layout", LayoutName.ZIGZAG)
    for name in ("logits_save_dir", "logits_load_dir"):
        path = getattr(args, name, None)
        if path and layout not in ZIGZAGS and args.context_parallel_size > 1:
            yield (
                f"{name} = {path}: its rows are those of Megatron's zigzag, not of --burst-layout "
                f"{layout}: drop one of them"
            )


def _mtp_refusals(args: Any) -> Iterator[str]:
    """What Megatron leaves out beside multi-token prediction: layers, documents, gradients."""
    if not (layers := getattr(args, "mtp_num_layers", None)):
        return
    variant = getattr(args, "experimental_attention_variant", None)
    if variant and not getattr(args, "hybrid_layer_pattern", None):
        yield (
            f"mtp_num_layers = {layers}: a GPTModel of Megatron's has no MTP beside {variant}: "
            "take --hybrid-layer-pattern, or drop --mtp-num-layers"
        )
    if (name := documents_flag(args)) and _runs_plans(args):
        yield (
            f"{name} = True, mtp_num_layers = {layers}: Megatron's schedule plans have no MTP "
            "beside documents: drop --overlap-moe-expert-parallel-comm, or one of them"
        )
    ranks = getattr(args, "context_parallel_size", 1)
    if getattr(args, "mtp_hsm", False) and ranks > 1:  # of main
        yield (
            f"mtp_hsm = True: over {ranks} context-parallel ranks Megatron mixes other hidden "
            "states, and no gradient crosses the borders of chunks: drop --mtp-hsm"
        )
