"""What of a model and a job has to divide by what, all of it at once, with the numbers."""

from argparse import Namespace
from collections.abc import Iterator

from megatron_burst.tools.doctor.check import Finding, Level


def findings(args: Namespace, ranks: int) -> list[Finding]:
    """Check every division of which both numbers are known.

    Args:
        args: as they were given.
        ranks: of the whole job.
    """
    return [_finding(*division) for division in _divisions(args, ranks)]


type _Division = tuple[str, int, str, int]


def _divisions(args: Namespace, ranks: int) -> Iterator[_Division]:
    """Yield (what, number, by what, number)."""
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    pipeline = args.pipeline_model_parallel_size
    model = tensor * context * pipeline
    parallel = (
        "--tensor-model-parallel-size x --context-parallel-size x --pipeline-model-parallel-size"
    )
    yield "the ranks of the job", ranks, parallel, model
    if args.seq_length and context > 1:
        yield "--seq-length", args.seq_length, "2 x --context-parallel-size", 2 * context
    if args.seq_length and args.sequence_parallel:
        local = args.seq_length // context
        yield "a rank's part of --seq-length", local, "--tensor-model-parallel-size", tensor
    if args.num_attention_heads:
        heads = args.num_attention_heads
        yield "--num-attention-heads", heads, "--tensor-model-parallel-size", tensor
        if args.group_query_attention:
            groups = args.num_query_groups
            yield "--num-attention-heads", heads, "--num-query-groups", groups
            larger, smaller = max(groups, tensor), min(groups, tensor)
            yield "the larger of --num-query-groups and TP", larger, "the smaller", smaller
        if args.hidden_size and not args.kv_channels:
            yield "--hidden-size", args.hidden_size, "--num-attention-heads", heads
    if args.num_layers and _is_even(args):
        yield "--num-layers", args.num_layers, "--pipeline-model-parallel-size", pipeline
    given = args.micro_batch_size and args.global_batch_size
    if given and ranks % model == 0 and not args.decrease_batch_size_if_needed:
        replicas = args.micro_batch_size * (ranks // model)
        name = "--micro-batch-size x data-parallel ranks"
        yield "--global-batch-size", args.global_batch_size, name, replicas
    if args.num_experts:
        size = args.expert_model_parallel_size
        yield "--num-experts", args.num_experts, "--expert-model-parallel-size", size
        experts = (args.expert_tensor_parallel_size or tensor) * size * pipeline
        parallel = "expert TP x EP x PP (--expert-tensor-parallel-size is TP where it is not given)"
        yield "the ranks of the job", ranks, parallel, experts
    if args.seq_length and args.fp8 and ranks % model == 0:
        tokens = (args.micro_batch_size or 1) * args.seq_length // context
        tokens //= tensor if args.sequence_parallel else 1
        multiple = 32 if args.fp8_recipe == "mxfp8" else 16
        yield "a rank's tokens of a micro-batch, under FP8", tokens, "FP8's tiles", multiple


def _is_even(args: Namespace) -> bool:
    """Whether nothing says that pipeline stages have different numbers of layers."""
    names = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    )
    uneven = any(getattr(args, name, None) for name in names)
    account = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return not uneven and not any(getattr(args, name, False) for name in account)


def _finding(what: str, number: int, by: str, divisor: int) -> Finding:
    if number % divisor == 0:
        return Finding("divisibility", Level.OK, f"{what}, {number}, divides by {by}, {divisor}")
    below, above = number // divisor * divisor, (number // divisor + 1) * divisor
    nearest = f"{above}" if not below else f"{below} or {above}"
    return Finding(
        "divisibility",
        Level.ERROR,
        f"{what}, {number}, does not divide by {by}, {divisor}",
        f"make it {nearest}, or change {by}",
    )
