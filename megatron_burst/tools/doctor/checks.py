"""What is known to go wrong with a command line that Megatron's parser lets pass.

docs/doctor.md has a row for each, with where it was reported.
"""

import importlib.util
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from megatron_burst.plugin.arguments import asks_for_us
from megatron_burst.plugin.limits import MEGATRON
from megatron_burst.tools.doctor.launch_line import LaunchLine, Target
from megatron_burst.tools.doctor.parsing import Parsed
from megatron_burst.tools.doctor.report import Finding, Level
from megatron_burst.tools.flags import DOCUMENTS, flags_of, heads_of

BURST = "--context-parallel-algo burst"
_LOOKED_AT = 64  # documents
_HARMFUL = {
    "NCCL_P2P_DISABLE": "messages between GPUs of a node go through the host's memory",
    "NCCL_SHM_DISABLE": "messages between GPUs of a node go through the network",
    "NCCL_IB_DISABLE": "messages between nodes go over TCP sockets",
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel, so nothing overlaps",
}
_ERROR, _WRONG, _WARNING, _NOTE = Level


def findings(line: LaunchLine, target: Target, parsed: Parsed) -> Iterator[Finding]:
    """Yield why the command line would stop, and what every check has to say."""
    yield from launcher_findings(line, target)
    if line.program.endswith(".py") and not target.is_cluster and not Path(line.program).is_file():
        yield Finding("no-script", _ERROR, f"there is no {line.program} here")
    if not line.starts_us and asks_for_us(line.flags):
        text = f"{line.program} does not start megatron_burst, so its flags are unknown there"
        yield Finding("not-attached", _ERROR, text, f"-m megatron_burst.run {line.program}")
    yield from (Finding("validation", _ERROR, text) for text in parsed.stops)
    if parsed.unknown:
        yield Finding("checkpoint-args", _NOTE, parsed.unknown, "also pass the model's flags")
    if parsed.absent:
        yield Finding("not-here", _NOTE, parsed.absent)
    if (args := parsed.args) is None:
        return
    is_ours = getattr(args, "context_parallel_algo", MEGATRON) != MEGATRON
    yield from _sizes(args, target.nodes * target.ranks_per_node)
    yield from _start(args, line, target)
    yield from _losses(args)
    yield from _windows(args)
    yield from _documents(args, is_ours)
    yield from _megatrons_chunks(args)
    if not is_ours:
        yield from _megatrons_attention(args)


def launcher_findings(line: LaunchLine, target: Target) -> Iterator[Finding]:
    """Compare what torchrun is told with the machine, or with what the options say."""
    here, ranks = torch.cuda.device_count(), f"{target.ranks_per_node} ranks a node"
    if one_a_gpu := line.nodes is not None and line.ranks_per_node is None:
        ranks = "torchrun's --nproc-per-node gpu"
    elif target.device.type == "cpu":
        here = target.ranks_per_node  # any number
    if not target.is_cluster and (one_a_gpu or target.ranks_per_node > here):
        text = f"{ranks}, but this machine has {here} GPUs"
        yield Finding("ranks", _ERROR, text, "--nproc-per-node, or --gpus-per-node for a cluster")
    said = (line.nodes or target.nodes, line.ranks_per_node or target.ranks_per_node)
    if said != (target.nodes, target.ranks_per_node):
        text = f"torchrun starts {said[0]} x {said[1]} ranks, the options say: {target}"
        yield Finding("ranks", _ERROR, text, "--nnodes and --nproc-per-node")


# ---- runs that stop after the parser, or start something else than meant


def _sizes(args: Namespace, ranks: int) -> Iterator[Finding]:
    """Divisions that Megatron looks at only when the model runs."""
    heads = args.num_attention_heads or 0
    groups = (args.group_query_attention and args.num_query_groups) or 1
    local = (args.seq_length or 0) // (args.context_parallel_size or 1)
    tensor, experts = args.tensor_model_parallel_size, args.expert_model_parallel_size
    of_experts = (args.expert_tensor_parallel_size or tensor) * args.pipeline_model_parallel_size
    sizes = "--expert-model-parallel-size x pipeline x expert-tensor sizes"
    for what, number, by, divisor in (
        ("--num-attention-heads", heads, "--num-query-groups", groups),
        (
            *("a rank's part of --seq-length", local, "--tensor-model-parallel-size"),
            tensor if args.sequence_parallel else 1,
        ),
        ("the number of ranks", ranks, sizes, of_experts * experts if experts > 1 else 1),
    ):
        if number % (divisor or 1):
            text = f"{what}, {number}, does not divide by {by}, {divisor}"
            yield Finding("divisibility", _ERROR, text, f"change {what} or {by}")


def _start(args: Namespace, line: LaunchLine, target: Target) -> Iterator[Finding]:
    if args.spec and not line.is_attached and _is_missing(args.spec[0]):  # attached, an error
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
    has_one = args.load and Path(args.load, "latest_checkpointed_iteration.txt").is_file()
    is_meant = args.load in (None, args.save) or args.exit_on_missing_checkpoint
    if not (has_one or is_meant or target.is_cluster):
        text = f"--load {args.load} has no checkpoint: training starts from random weights"
        yield Finding("lost-checkpoint", _WARNING, text, "--exit-on-missing-checkpoint")


def _is_missing(module: str) -> bool:
    try:
        return module != "local" and importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


# ---- losses, gradients and windows that are not what was meant


def _losses(args: Namespace) -> Iterator[Finding]:
    if args.context_parallel_size > 1 and not args.calculate_per_token_loss:
        uneven = args.eod_mask_loss or args.dataloader_inter_document_masking or args.sft
        text = (
            "each context-parallel rank's loss is divided by its own number of tokens, and the "
            "ranks are averaged: where loss masks differ, the loss depends on the number of ranks, "
            "and a rank without tokens may give NaN"
        )
        level = _WRONG if uneven else _WARNING
        yield Finding("mean-of-means", level, text, "--calculate-per-token-loss")
    if args.context_parallel_size > 1 and args.hidden_dropout:
        text = (
            f"--hidden-dropout is {args.hidden_dropout}: context-parallel ranks draw the same "
            "random numbers for different tokens, so results depend on their number"
        )
        yield Finding("repeated-dropout", _WARNING, text, "--hidden-dropout 0")


def _windows(args: Namespace) -> Iterator[Finding]:
    if args.window_attn_skip_freq is not None and args.window_size is None:
        text = "--window-attn-skip-freq without a window: every layer sees all keys"
        yield Finding("idle-window", _WRONG, text, "--window-size LEFT,0")
    if args.window_size and (left := args.window_size[0]) >= 0:
        text = f"a query sees itself and {left} keys before it"
        if args.seq_length and left >= args.seq_length - 1:
            text += f", all that a sample of {args.seq_length} tokens has"
        remedy = "for a model card's sliding window of W keys --window-size W-1,0"
        yield Finding("window-width", _NOTE, text, remedy)


# ---- Megatron's own attention


def _megatrons_attention(args: Namespace) -> Iterator[Finding]:
    if args.softmax_type == "learnable" and args.tensor_model_parallel_size > 1:
        text = "gradients of sinks count in the norm on the first TP rank alone: clipping is wrong"
        yield Finding("sink-norm", _WRONG, text, BURST)
    if args.reset_attention_mask and args.transformer_impl == "transformer_engine":
        text = "TransformerEngine's causal kernels do not read the mask of --reset-attention-mask"
        yield Finding("idle-mask", _WRONG, text, DOCUMENTS)
    size = (args.seq_length or 0) ** 2 * (args.micro_batch_size or 1) / 2**30
    if args.create_attention_mask_in_dataloader and size >= 1:
        text = f"the data loader makes a mask of {size:,.0f} GiB for every micro-batch"
        yield Finding("dense-mask", _WARNING, text, "--no-create-attention-mask-in-dataloader")
    types = set(args.cp_comm_type or ["p2p"]) if args.context_parallel_size > 1 else set()
    for is_wanted, what, lack_it in (
        (args.window_size, "windows", {"p2p", "a2a+p2p"}),
        (args.softmax_type != "vanilla", "sinks", {"p2p", "all_gather", "a2a+p2p"}),
        (args.dataloader_inter_document_masking, "documents", {"all_gather", "a2a+p2p"}),
    ):
        if is_wanted and (lacking := sorted(types & lack_it)):
            text = (
                f"TransformerEngine 2.17 has no {what} with --cp-comm-type {' '.join(lacking)}; "
                "older versions may leave them out without a word"
            )
            yield Finding("te-features", _ERROR, text, BURST)
    levels = args.hierarchical_context_parallel_sizes or [1]
    heads = heads_of(flags_of(vars(args))) if args.num_attention_heads else None
    for kind, ranks in (("a2a", args.context_parallel_size), ("a2a+p2p", levels[0])):
        tensor = args.tensor_model_parallel_size
        if kind in types and heads and (why := heads.why_no_a2a(tensor, ranks)):
            yield Finding("divisibility", _ERROR, f"--cp-comm-type {kind}: {why}", BURST)


def _megatrons_chunks(args: Namespace) -> Iterator[Finding]:
    """Megatron's own chunks of an MLP, under recompute."""
    chunks = getattr(args, "mlp_chunks_for_training", 1) or 1
    if chunks > 1 and args.recompute_granularity == "full":
        text = (
            f"--mlp-chunks-for-training {chunks} saves a fifth under full recompute, for autograd "
            "keeps every chunk of the replay: the backward of an 8B layer's MLP holds 21 times "
            "the layer's input with 4 chunks, 26 without, and 12 with --mlp-chunks"
        )
        yield Finding("megatrons-chunks", _WARNING, text, "--mlp-chunks auto in its place")


# ---- documents: whether attention, positions and ranks follow them


def _documents(args: Namespace, is_ours: bool) -> Iterator[Finding]:
    yield from _positions(args)
    yield from _ends(args)
    meant = args.reset_position_ids or args.eod_mask_loss
    if args.dataloader_inter_document_masking:
        if not is_ours:
            yield from _megatrons_documents(args)
        elif args.burst_block_mask:
            text = (
                "--burst-block-mask counts blocks from the start of a sample, not of its "
                "documents: a block that all others may see is seen by its own documents alone"
            )
            yield Finding("blocks-of-samples", _WARNING, text, f"drop one of it and {DOCUMENTS}")
    elif (meant or args.data_path) and not (
        args.sft or args.mock_data or args.reset_attention_mask
    ):
        text = "every sample is cut from joined documents, and a token attends to all before it"
        yield Finding("joined-documents", _WARNING if meant else _NOTE, text, DOCUMENTS)


def _positions(args: Namespace) -> Iterator[Finding]:
    if not args.reset_position_ids or args.reset_attention_mask:
        return
    level, remedy = _WRONG, DOCUMENTS
    text = "positions begin anew in every document, but attention sees the documents before it"
    if args.position_embedding_type in ("rope", "yarn", "none"):
        text = "nothing reads position ids of a model without learned positions"
    if args.dataloader_inter_document_masking:
        level, remedy = _NOTE, "drop --reset-position-ids"
        text = f"{DOCUMENTS} begins positions anew by itself, so the data loader does it twice"
    if args.sft:
        level, remedy = _ERROR, "drop --reset-position-ids"
        text = "the data set of --sft asserts that it is off"
    yield Finding("idle-positions", level, f"--reset-position-ids: {text}", remedy)


def _ends(args: Namespace) -> Iterator[Finding]:
    """Flags that look for end tokens, which `preprocess_data.py` writes with --append-eod alone."""
    from megatron_burst.data_checks.data_files import readable_indexes  # imports Megatron

    names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    flags = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    for prefix, index in readable_indexes(args) if flags else ():
        first = index.sequence_pointers[:_LOOKED_AT] // index.dtype_size
        last = first + index.sequence_lengths[:_LOOKED_AT] - 1
        tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")
        if len(np.unique(tokens[last])) > 1:
            text = f"{' and '.join(flags)}: documents of {prefix} do not all end with one token"
            yield Finding("no-end-tokens", _WRONG, text, "preprocess_data.py --append-eod")


def _megatrons_documents(args: Namespace) -> Iterator[Finding]:
    if args.transformer_impl == "local":
        text = "Megatron's local attention asserts in the first step that no sequences are packed"
        yield Finding("stock-documents", _ERROR, text, BURST)
    elif args.context_parallel_size > 1 and {*(args.cp_comm_type or ["p2p"])} & {"p2p", "a2a"}:
        text = (
            "Megatron splits the whole sequence among the ranks, TransformerEngine takes every "
            "document for split: queries meet the wrong keys"
        )
        yield Finding("stock-documents", _WRONG, text, BURST)


# ---- the environment


def variable_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Say what is set against a run's interest."""
    for name, why in _HARMFUL.items():
        if environment.get(name, "0") not in ("0", ""):
            text = f"{name}={environment[name]}: {why}"
            yield Finding("slow-links", Level.WARNING, text, f"unset {name}")
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if environment.get(name) == "0":
            text = f"{name}=0: torch ends no job whose rank is lost or stalls"
            yield Finding("stalls-unseen", Level.WARNING, text, f"unset {name}")
