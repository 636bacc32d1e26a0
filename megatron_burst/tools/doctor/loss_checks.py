"""Losses and gradients that are not what was meant, each a check."""

from megatron_burst.tools.doctor.check import Answer, Check, Level, Situation

_BURST = "--context-parallel-algo burst"


def _mean_of_means(s: Situation) -> Answer:
    args = s.args
    if args.context_parallel_size == 1 or args.calculate_per_token_loss:
        return None
    uneven = args.eod_mask_loss or args.dataloader_inter_document_masking or args.sft
    return (
        Level.WRONG if uneven else Level.WARNING,
        "each context-parallel rank's loss is divided by its own number of tokens, and the ranks "
        "are averaged: where loss masks differ, the loss depends on the number of ranks, and a "
        "rank without tokens may give NaN",
        "--calculate-per-token-loss",
    )


def _repeated_dropout(s: Situation) -> Answer:
    if s.args.context_parallel_size == 1 or not s.args.hidden_dropout:
        return None
    return (
        Level.WARNING,
        f"--hidden-dropout is {s.args.hidden_dropout}: context-parallel ranks draw the same random "
        "numbers for different tokens, so results depend on their number",
        "--hidden-dropout 0",
    )


def _sink_norm(s: Situation) -> Answer:
    args = s.args
    if s.is_ours or args.softmax_type != "learnable" or args.tensor_model_parallel_size == 1:
        return None
    return (
        Level.WRONG,
        "the gradients of sinks count in the norm on the first tensor-parallel rank alone, so that "
        "clipping is wrong",
        _BURST,
    )


def _bf16_sums(s: Situation) -> Answer:
    args = s.args
    if s.on_megatrons_ring and args.bf16:
        text = "TransformerEngine sums gradients of Q, K and V over the ranks in bfloat16"
        return Level.NOTE, text, f"{_BURST}, which sums in float32"
    if s.is_ours and args.burst_grad_dtype == "model" and args.context_parallel_size > 8:
        text = f"gradients are rounded on each of {args.context_parallel_size} ranks"
        return Level.NOTE, text, "--burst-grad-dtype float32"
    return None


def _nan_unseen(s: Situation) -> Answer:
    if s.args.check_for_nan_in_loss_and_grad:
        return None
    text = "a loss that is NaN goes on unseen, and context parallelism spreads it to all ranks"
    return Level.WARNING, text, "drop --no-check-for-nan-in-loss-and-grad"


CHECKS: tuple[Check, ...] = (
    Check(
        "mean-of-means", "loss masks that differ between ranks", "MC#7452, MC#1764", _mean_of_means
    ),
    Check("repeated-dropout", "the same dropout on different tokens", "MC", _repeated_dropout),
    Check("sink-norm", "gradients of sinks missing from the norm", "MC#7452", _sink_norm),
    Check("bf16-sums", "sums of travelling gradients in bfloat16", "TE#1557, TE#821", _bf16_sums),
    Check("nan-unseen", "NaN that spreads over the ranks", "MC#1764, TE#2186", _nan_unseen),
)
