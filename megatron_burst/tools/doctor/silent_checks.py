"""Losses, gradients, positions and masks that are not what was meant, each a check."""

from megatron_burst.tools.doctor.check import Answer, Check, Level, Situation, check

_BURST = "--context-parallel-algo burst"
_DOCUMENTS = "--dataloader-inter-document-masking"
_ROTARY = ("rope", "yarn", "mrope")
_LARGE_MASK = 2**30  # bytes


@check("mean-of-means", "loss masks that differ between ranks", "MC#7452, MC#1764")
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


@check("repeated-dropout", "the same dropout on different tokens", "MC")
def _repeated_dropout(s: Situation) -> Answer:
    if s.args.context_parallel_size == 1 or not s.args.hidden_dropout:
        return None
    return (
        Level.WARNING,
        f"--hidden-dropout is {s.args.hidden_dropout}: context-parallel ranks draw the same random "
        "numbers for different tokens, so results depend on their number",
        "--hidden-dropout 0",
    )


@check("sink-norm", "gradients of sinks missing from the norm", "MC#7452")
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


@check("bf16-sums", "sums of sent gradients in bfloat16", "TE#1557, TE#821")
def _bf16_sums(s: Situation) -> Answer:
    args = s.args
    if s.on_megatrons_ring and args.bf16:
        text = "TransformerEngine sums gradients of Q, K and V over the ranks in bfloat16"
        return Level.NOTE, text, f"{_BURST}, which sums in float32"
    if s.is_ours and args.burst_grad_dtype == "model" and args.context_parallel_size > 8:
        text = f"gradients are rounded on each of {args.context_parallel_size} ranks"
        return Level.NOTE, text, "--burst-grad-dtype float32"
    return None


@check("nan-unseen", "NaN that spreads over the ranks", "MC#1764, TE#2186")
def _nan_unseen(s: Situation) -> Answer:
    if s.args.check_for_nan_in_loss_and_grad:
        return None
    text = "a loss that is NaN goes on unseen, and context parallelism spreads it to all ranks"
    return Level.WARNING, text, "drop --no-check-for-nan-in-loss-and-grad"


@check("joined-documents", "attention over the bounds of documents", "axolotl#3608, MC#6156")
def _joined_documents(s: Situation) -> Answer:
    args = s.args
    if args.dataloader_inter_document_masking or args.mock_data or args.sft:
        return None
    meant = args.reset_position_ids or args.eod_mask_loss
    if not meant and not args.data_path:
        return None
    text = "every sample is cut from joined documents, and a token attends to all before it"
    return Level.WARNING if meant else Level.NOTE, text, _DOCUMENTS


@check("idle-positions", "position ids that nothing reads", "MC#1612, MC#560")
def _idle_positions(s: Situation) -> Answer:
    if not s.args.reset_position_ids or s.args.position_embedding_type not in _ROTARY:
        return None
    text = "rotary embeddings do not read position ids, so --reset-position-ids has no effect"
    return Level.WRONG, text, _DOCUMENTS


@check("idle-mask", "a dense mask that nothing reads", "MC#1025")
def _idle_mask(s: Situation) -> Answer:
    if s.is_ours or not s.args.reset_attention_mask or not s.has_transformer_engine:
        return None  # ours refuses it
    text = "TransformerEngine's causal kernels do not read the mask of --reset-attention-mask"
    return Level.WRONG, text, _DOCUMENTS


@check("dense-mask", "a mask of seq x seq in the data loader", "MC#1025")
def _dense_mask(s: Situation) -> Answer:
    args = s.args
    if s.is_ours or not args.create_attention_mask_in_dataloader or not args.seq_length:
        return None
    size = args.seq_length**2 * (args.micro_batch_size or 1)
    if size < _LARGE_MASK:
        return None
    text = f"the data loader makes a mask of {size / 2**30:,.0f} GiB for every micro-batch"
    return Level.WARNING, text, "--no-create-attention-mask-in-dataloader"


@check("idle-window", "layers that lose their window", "accelerate#4177, prime-rl#2828")
def _idle_window(s: Situation) -> Answer:
    if s.args.window_attn_skip_freq is None or s.args.window_size is not None:
        return None
    text = "--window-attn-skip-freq without a window: every layer sees all keys"
    return Level.WRONG, text, "--window-size LEFT,0"


@check("window-width", "windows that are wider by one", "MC#2222")
def _window_width(s: Situation) -> Answer:
    window = s.args.window_size
    if not window or window[0] < 0:
        return None
    text = (
        f"--window-size {window[0]},{window[1]}: a query sees itself and {window[0]} keys before "
        f"it; a model card's sliding window of W keys is W-1"
    )
    return Level.NOTE, text, ""


@check("multimodal-rotary", "mrope under context parallelism", "MC#1612, MC#453")
def _multimodal_rotary(s: Situation) -> Answer:
    args = s.args
    if args.context_parallel_size == 1 or args.position_embedding_type != "mrope":
        return None
    text = "mrope was cut wrongly over context-parallel ranks in versions of Megatron"
    return Level.WARNING, text, "compare with --context-parallel-size 1"


CHECKS: tuple[Check, ...] = (
    _mean_of_means,
    _repeated_dropout,
    _sink_norm,
    _bf16_sums,
    _nan_unseen,
    _joined_documents,
    _idle_positions,
    _idle_mask,
    _dense_mask,
    _idle_window,
    _window_width,
    _multimodal_rotary,
)
