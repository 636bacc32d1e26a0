"""Known errors of command lines that Megatron's parser lets pass.

docs/doctor.md has a row for each, with where it was reported.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

from megatron_burst.plugin.arguments import MEGATRON
from megatron_burst.tools.doctor.situation import Finding, Level, Situation, names_our_spec

_BURST = "--context-parallel-algo burst"
_DOCUMENTS = "--dataloader-inter-document-masking"
_TE_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_ERROR, _WRONG, _WARNING, _NOTE = Level


def findings(s: Situation) -> Iterator[Finding]:
    """Yield what every check has to say."""
    looks = [_losses, _gradients, _documents, _masks, _windows, _sizes, _start, _files, _limits]
    if not s.is_ours and s.args.context_parallel_size > 1:
        looks += [_te_ring, _te_features, _te_heads]
    for look in looks:
        yield from look(s)


# ---- losses, gradients and masks that are not what was meant


def _losses(s: Situation) -> Iterator[Finding]:
    args, context = s.args, s.args.context_parallel_size
    if context > 1 and not args.calculate_per_token_loss:
        uneven = args.eod_mask_loss or args.dataloader_inter_document_masking or args.sft
        text = (
            "each context-parallel rank's loss is divided by its own number of tokens, and the "
            "ranks are averaged: where loss masks differ, the loss depends on the number of ranks, "
            "and a rank without tokens may give NaN"
        )
        level = _WRONG if uneven else _WARNING
        yield Finding("mean-of-means", level, text, "--calculate-per-token-loss")
    if context > 1 and args.hidden_dropout:
        text = (
            f"--hidden-dropout is {args.hidden_dropout}: context-parallel ranks draw the same "
            "random numbers for different tokens, so results depend on their number"
        )
        yield Finding("repeated-dropout", _WARNING, text, "--hidden-dropout 0")
    if not args.check_for_nan_in_loss_and_grad:
        text = "a loss that is NaN goes on unseen, and context parallelism spreads it to all ranks"
        remedy = "drop --no-check-for-nan-in-loss-and-grad"
        yield Finding("nan-unseen", _WARNING, text, remedy)


def _gradients(s: Situation) -> Iterator[Finding]:
    args, context = s.args, s.args.context_parallel_size
    if not s.is_ours and args.softmax_type == "learnable" and args.tensor_model_parallel_size > 1:
        text = (
            "the gradients of sinks count in the norm on the first tensor-parallel rank alone, so "
            "that clipping is wrong"
        )
        yield Finding("sink-norm", _WRONG, text, _BURST)
    if not s.is_ours and context > 1 and args.bf16:
        text = "TransformerEngine sums gradients of Q, K and V over the ranks in bfloat16"
        yield Finding("bf16-sums", _NOTE, text, f"{_BURST}, which sums in float32")
    if s.is_ours and args.burst_grad_dtype == "model" and context > 8:
        text = f"gradients are rounded on each of {context} ranks"
        yield Finding("bf16-sums", _NOTE, text, "--burst-grad-dtype float32")


def _documents(s: Situation) -> Iterator[Finding]:
    args = s.args
    meant = args.reset_position_ids or args.eod_mask_loss
    told_apart = args.dataloader_inter_document_masking or args.mock_data or args.sft
    if (meant or args.data_path) and not told_apart:
        text = "every sample is cut from joined documents, and a token attends to all before it"
        yield Finding("joined-documents", _WARNING if meant else _NOTE, text, _DOCUMENTS)
    if args.reset_position_ids and args.position_embedding_type in ("rope", "yarn", "mrope"):
        text = "rotary embeddings do not read position ids, so --reset-position-ids has no effect"
        yield Finding("idle-positions", _WRONG, text, _DOCUMENTS)


def _masks(s: Situation) -> Iterator[Finding]:
    args = s.args
    if s.is_ours:  # which refuses or never makes them
        return
    if args.reset_attention_mask and s.has_transformer_engine:
        text = "TransformerEngine's causal kernels do not read the mask of --reset-attention-mask"
        yield Finding("idle-mask", _WRONG, text, _DOCUMENTS)
    size = (args.seq_length or 0) ** 2 * (args.micro_batch_size or 1) / 2**30
    if args.create_attention_mask_in_dataloader and size >= 1:
        text = f"the data loader makes a mask of {size:,.0f} GiB for every micro-batch"
        remedy = "--no-create-attention-mask-in-dataloader"
        yield Finding("dense-mask", _WARNING, text, remedy)


def _windows(s: Situation) -> Iterator[Finding]:
    args = s.args
    if args.window_attn_skip_freq is not None and args.window_size is None:
        text = "--window-attn-skip-freq without a window: every layer sees all keys"
        yield Finding("idle-window", _WRONG, text, "--window-size LEFT,0")
    if args.window_size and args.window_size[0] >= 0:
        text = (
            f"--window-size {','.join(map(str, args.window_size))}: a query sees itself and "
            f"{args.window_size[0]} keys before it; a model card's sliding window of W keys is W-1"
        )
        yield Finding("window-width", _NOTE, text)
    if args.context_parallel_size > 1 and args.position_embedding_type == "mrope":
        text = "mrope was cut wrongly over context-parallel ranks in versions of Megatron"
        yield Finding("multimodal-rotary", _WARNING, text, "compare with --context-parallel-size 1")


# ---- TransformerEngine's context parallelism


def _te_ring(s: Situation) -> Iterator[Finding]:
    if unknown := sorted(s.comm_types - set(_TE_TYPES)):
        text = (
            f"--cp-comm-type {' '.join(unknown)}: TransformerEngine knows {', '.join(_TE_TYPES)}, "
            "and says so only when the first layer runs"
        )
        remedy = "--cp-comm-type all_gather" if "allgather" in unknown else _BURST
        yield Finding("te-spelling", _ERROR, text, remedy)
    if "p2p" in s.comm_types and s.environment.get("NVTE_BATCH_MHA_P2P_COMM") != "1":
        text = "TransformerEngine's ring has ended in NCCL errors or hangs on some machines"
        yield Finding("te-hang", _NOTE, text, "if so, NVTE_BATCH_MHA_P2P_COMM=1")


def _te_features(s: Situation) -> Iterator[Finding]:
    """What a way of sending lacks."""
    lacking = {
        "te-window": (s.args.window_size is not None, "windows", {"p2p", "a2a+p2p"}, "a2a"),
        "te-sinks": (s.args.softmax_type != "vanilla", "sinks", {*_TE_TYPES} - {"a2a"}, "a2a"),
        "te-documents": (
            *(s.args.dataloader_inter_document_masking, "documents"),
            *({"all_gather", "a2a+p2p"}, "p2p"),
        ),
    }
    for name, (is_wanted, feature, ways, other) in lacking.items():
        if is_wanted and (found := s.comm_types & ways):
            text = (
                f"TransformerEngine 2.17 has no {feature} with --cp-comm-type "
                f"{' '.join(sorted(found))}; older versions may leave them out without a word"
            )
            yield Finding(name, _ERROR, text, f"{_BURST}, or --cp-comm-type {other}")


def _te_heads(s: Situation) -> Iterator[Finding]:
    args, tensor = s.args, s.args.tensor_model_parallel_size
    if "a2a" not in s.comm_types or not args.num_attention_heads:
        return
    heads = args.num_attention_heads // tensor
    kv = max(args.num_query_groups // tensor, 1) if args.group_query_attention else heads
    if math.gcd(heads, kv) % args.context_parallel_size:
        text = (
            f"--cp-comm-type a2a: {heads} query and {kv} kv heads of a rank do not divide by "
            f"{args.context_parallel_size} ranks"
        )
        yield Finding("te-heads", _ERROR, text, _BURST)


# ---- runs that stop after the model is built, or start something else than meant


def _sizes(s: Situation) -> Iterator[Finding]:
    """Divisions that Megatron looks at only after its parser, or never."""
    args, tensor = s.args, s.args.tensor_model_parallel_size
    local = (args.seq_length or 0) // args.context_parallel_size
    over = tensor if args.sequence_parallel else 1
    tokens, tile = (
        local * (args.micro_batch_size or 1) // over,
        32 if args.fp8_recipe == "mxfp8" else 16,
    )
    heads, groups = (
        args.num_attention_heads or 0,
        args.group_query_attention and args.num_query_groups,
    )
    experts = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size
    experts *= args.pipeline_model_parallel_size
    parallel = "expert TP x EP x PP (--expert-tensor-parallel-size is TP where it is not given)"
    for what, number, by, divisor in (
        ("--num-attention-heads", heads, "--num-query-groups", groups or 1),
        ("a rank's part of --seq-length", local, "--tensor-model-parallel-size", over),
        ("the ranks of the job", s.target.ranks, parallel, experts if args.num_experts else 1),
        ("a rank's tokens of a micro-batch", tokens, "FP8's tiles", tile if args.fp8 else 1),
    ):
        if number % divisor:
            text = f"{what}, {number}, does not divide by {by}, {divisor}"
            yield Finding("divisibility", _ERROR, text, f"change {what} or {by}")


def _start(s: Situation) -> Iterator[Finding]:
    args = s.args
    by_flag = str(args.context_parallel_algo) != MEGATRON
    by_name = "burst" in s.comm_types and not names_our_spec(args)
    if not s.line.is_attached and (by_flag or by_name):
        text = f"{s.line.program} does not start megatron_burst, so its flags are unknown there"
        yield Finding("not-attached", _ERROR, text, f"-m megatron_burst.run {s.line.program}")
    if args.spec and not s.line.is_attached and _is_missing(args.spec[0]):  # attached, an error
        text = (
            f"--spec {' '.join(args.spec)} cannot be imported here: Megatron 0.19 then takes its "
            "default layers without a word, and no ring runs"
        )
        yield Finding("lost-spec", _WRONG, text, "put its folder on PYTHONPATH")
    if args.train_iters is None and args.train_samples is None:
        text = "nothing says how long to train: Megatron ends with a TypeError after the model"
        yield Finding("no-length", _ERROR, text, "--train-iters N")
    elif args.eval_interval is None and not (args.full_validation or args.skip_train):
        text = "Megatron divides by --eval-interval after the model is built, at --eval-iters 0 too"
        yield Finding("no-length", _ERROR, text, "--eval-interval N")


def _is_missing(module: str) -> bool:
    try:
        return module != "local" and importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def _files(s: Situation) -> Iterator[Finding]:
    args = s.args
    prefixes = [p for p in args.data_path or () if not _is_weight(p) and "://" not in p]
    missing = [p for p in prefixes for end in (".bin", ".idx") if not Path(p + end).is_file()]
    if missing:
        text = f"there is no {missing[0]}.bin and .idx here"
        yield Finding("lost-data", _NOTE if s.target.is_cluster else _ERROR, text, "--data-path")
    has_one = args.load and Path(args.load, "latest_checkpointed_iteration.txt").is_file()
    if args.load and not has_one and not args.exit_on_missing_checkpoint:
        text = f"where --load {args.load} has no checkpoint, training starts from random weights"
        level = _NOTE if args.load == args.save or s.target.is_cluster else _WARNING
        yield Finding("lost-checkpoint", level, text, "--exit-on-missing-checkpoint")


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _limits(s: Situation) -> Iterator[Finding]:
    seconds = 60 * s.args.distributed_timeout_minutes
    heartbeat = s.environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    if heartbeat.isdigit() and 0 < int(heartbeat) < seconds:
        text = (
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} ends the process before the time limit "
            f"of {seconds} s, and without the name of the message that stalls"
        )
        remedy = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={2 * seconds}"
        yield Finding("timeouts", _WARNING, text, remedy)
