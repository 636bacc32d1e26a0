"""Pretraining on Megatron's building blocks: batches, loss, data sets and final figures."""

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_tp_rank,
)
from megatron.training import (
    argument_utils,
    get_args,
    get_tensorboard_writer,
    get_timers,
    training,
)
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.compat import peak_resident_bytes
from megatron_burst.plugin.refusals import documents_flag
from megatron_burst.transport import lock

logger = logging.getLogger(__name__)

# A shared file system may keep the lock of a machine that is gone for a minute and a half.
_PATIENCE_SECONDS = 100.0

_NEEDS_UPSTREAM_SCRIPT = (
    "fim_data logits_load_dir hybrid_context_parallel check_for_spiky_loss log_straggler "
    "inprocess_restart"
).split()
# Any of these says where tokens come from, or that none are needed.
_DATA = (
    "mock_data data_path data_args_path train_data_path valid_data_path test_data_path "
    "per_split_data_args_path ckpt_convert_format"
).split()
_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_DOCUMENT_KEYS = ("cu_seqlens", "max_seqlen")


def model_config(args: Namespace) -> Any:
    """Return the configuration of the model that the arguments describe, hybrid or GPT."""
    if args.hybrid_layer_pattern is not None:
        return argument_utils.hybrid_config_from_args(args)
    return argument_utils.gpt_config_from_args(args)


def refusal(args: Namespace) -> str | None:
    """Say why this entry cannot train what is asked for, if it cannot: no data, another script."""
    given = [name for name in _DATA if getattr(args, name)]
    if not given:
        return "no data is given: pass --data-path PREFIX, or --mock-data for made-up tokens"
    if args.sft and given == ["mock_data"]:
        return "--sft reads conversations: pass --data-path FILE in the place of --mock-data"
    if args.dataloader_type == "external":
        return "--dataloader-type external: this entry brings no loader: take single or cyclic"
    if args.moe_use_upcycling:
        return "--moe-use-upcycling: Megatron (0.19, main, dev) fails before it loads: drop it"
    if args.position_embedding_type == "mrope":
        return "--position-embedding-type mrope: no data set here has three positions a token"
    if args.freeze_all_layers and not hasattr(training, "_freeze_all_model_chunks"):
        return "--freeze-all-layers: Megatron 0.19 would train all weights: drop it, or take main"
    if reason := _evaluation_refusal(args) or _skipping_refusal(args):
        return reason
    flags = [
        f"--{name.replace('_', '-')}" for name in _NEEDS_UPSTREAM_SCRIPT if getattr(args, name)
    ]
    if args.mtp_num_layers and args.pipeline_model_parallel_layout:  # MTP may be on any stage
        flags.append("--mtp-num-layers with --pipeline-model-parallel-layout")
    if not flags:
        return None
    script = "pretrain_gpt.py" if args.hybrid_layer_pattern is None else "pretrain_hybrid.py"
    return (
        f"{', '.join(flags)} needs Megatron-LM's own script: "
        f"python -m megatron_burst.run PATH/{script}"
    )


def _evaluation_refusal(args: Namespace) -> str:
    """Say why Megatron's first evaluation would fail, maybe after a day; "" if it would not."""
    if args.full_validation and not args.multiple_validation_sets:
        return (
            "--full-validation: Megatron takes the length of one set for a list of them: add "
            "--multiple-validation-sets, which one set serves, too"
        )
    if args.train_data_path or args.valid_data_path or args.test_data_path:
        missing = "no --valid-data-path" if args.valid_data_path is None else ""
    else:
        is_split = bool(args.data_path or args.data_args_path) and args.split
        is_none = is_split and not parse_and_normalize_split(args.split)[1]
        missing = f"--split {args.split}" if is_none else ""
    if not missing or not (args.eval_iters or args.full_validation):
        return ""
    return (
        f"{missing}: there is no validation set for --eval-iters {args.eval_iters}: pass one, or "
        "--eval-iters 0"
    )


def _skipping_refusal(args: Namespace) -> str:
    """Say why Megatron's first iteration to skip would fail; "" if it would not, or there is none.

    There it asks every pipeline stage for a batch, and for one where virtual stages have several.
    """
    no_data = args.pipeline_model_parallel_size > 2 and not documents_flag(args)
    if not args.iterations_to_skip or not (no_data or args.virtual_pipeline_model_parallel_size):
        return ""
    return (
        "--iterations-to-skip: Megatron skips none with virtual pipeline stages, or with more than "
        "two stages without documents: until they are passed take two stages, none virtual"
    )


def hold_checkpoints(args: Namespace) -> None:
    """Keep other jobs out of --save while this one runs; the first rank does that for all.

    Ends the process where one is there and does not end soon, or where nothing can be saved.
    """
    if not args.save or args.skip_train or "://" in args.save or args.rank != 0:  # object stores
        return
    try:
        lock.hold(Path(args.save), patience=_PATIENCE_SECONDS, say=logger.warning)
    except lock.InUseError as error:
        sys.exit(f"megatron_burst: {error}")
    if not (os.path.isdir(args.save) and os.access(args.save, os.W_OK | os.X_OK)):
        sys.exit(f"megatron_burst: --save {args.save} is no directory that can be written to")


def forward_step(
    data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run the model on the next micro-batch; return its output and the function for its loss.

    Under --overlap-moe-expert-parallel-comm Megatron asks for a plan instead, and runs its nodes.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    args = get_args()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    batch = _next_batch(data_iterator, vp_stage, size)
    timers("batch-generator").stop()
    packed = _packed(batch["cu_seqlens"], batch["max_seqlen"])
    if packed is not None and model.training and not vp_stage:  # once a micro-batch that trains
        update_seqlen_stats_from_cu_seqlens(packed.cu_seqlens_q)  # in Megatron's FLOPs
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    return output, partial(_masked_loss, batch["loss_mask"])


def _next_batch(
    data_iterator: Iterator[Any], vp_stage: int | None, micro_batch_size: int
) -> dict[str, Tensor | None]:
    """This rank's tokens: read on TP rank 0, sent to the other TP ranks, cut over the CP ranks.

    With documents the samples of a micro-batch become one sequence; then every pipeline stage gets
    the boundaries, if nothing else.
    """
    args = get_args()
    documents = documents_flag(args) is not None
    on_edge = is_first_or_last_pipeline_stage(vp_stage)
    if not (on_edge or documents):
        return dict.fromkeys((*_BATCH_KEYS, *_DOCUMENT_KEYS))
    whole: dict[str, Tensor | None] = dict.fromkeys(("cu_seqlens_padded", "local_cp_size"))
    if mpu.get_tensor_model_parallel_rank() == 0:
        sample = next(data_iterator)
        for key in (*_BATCH_KEYS, *_DOCUMENT_KEYS):
            value = sample.get(key)
            whole[key] = None if value is None else value.cuda(non_blocking=True)
    whole = get_batch_on_this_tp_rank(
        whole,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=documents,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    whole = flatten_batch_for_packed_sequences(whole)
    if not on_edge:
        return {key: whole[key] if key in _DOCUMENT_KEYS else None for key in whole}
    return utils.get_batch_on_this_cp_rank(  # by our layout, where there is another one
        whole,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
        use_per_sequence_balancing=not args.sft,  # which has a zigzag of each document
    )


def _packed(cu_seqlens: Tensor | None, max_seqlen: Tensor | None) -> PackedSeqParams | None:
    """Say in Megatron's words where documents begin.

    The longest one's length is for Megatron's own attention and rotary embeddings; of the number of
    all tokens it makes what tells its Mamba layers where a document begins.
    """
    if cu_seqlens is None:
        return None
    assert max_seqlen is not None  # the data set makes both
    bounds = cu_seqlens.squeeze(0)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=int(max_seqlen),
        max_seqlen_kv=int(max_seqlen),
        total_tokens=int(bounds[-1]),
        tokens_per_sample=get_args().seq_length,
    )


def _masked_loss(
    loss_mask: Tensor | None, per_token: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return this rank's sum of losses, its number of tokens, and both for Megatron's report.

    Sums, not means: under `--calculate-per-token-loss` Megatron divides once, by the tokens of all
    ranks, so that ranks with fewer unmasked tokens weigh less. In evaluations of `--sft` it takes
    the mean of what the ranks report, so that there each reports the sums of the whole sequence.
    """
    assert loss_mask is not None  # only the last pipeline stage computes a loss
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = (per_token.view(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in {"NaN": torch.isnan, "Inf": torch.isinf}.items():
            text = f"{name} in this rank's loss"
            get_rerun_state_machine().validate_result(loss, is_bad, text, tolerance=0.0, fatal=True)
    report = torch.stack([loss.detach(), tokens.to(loss.dtype)])
    if args.sft and not torch.is_grad_enabled():
        dist.all_reduce(report, group=mpu.get_context_parallel_group())
    return loss, tokens, {"lm loss": report}


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the training, validation and test sets of the given numbers of samples."""
    args = get_args()
    builder = BlendedMegatronDatasetBuilder(
        SFTDataset if args.sft else MockGPTDataset if args.mock_data else GPTDataset,
        samples,
        partial(_reads_data, vp_stage),
        _dataset_config(args),
    )
    return builder.build()


# Megatron's loop asks this of the provider: every rank builds the data sets it needs.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def _reads_data(vp_stage: int | None) -> bool:
    reads = is_first_or_last_pipeline_stage(vp_stage) or documents_flag(get_args())
    return bool(reads and mpu.get_tensor_model_parallel_rank() == 0)


def _dataset_config(args: Namespace) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences = json.load(file)
    names = {part.name for part in fields(GPTDatasetConfig)}
    return GPTDatasetConfig(
        **{name: value for name, value in vars(args).items() if name in names},
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=sequences,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )


def write_run_figures(args: Any, shared: SharedState | None) -> None:
    """Add to TensorBoard what a run has sent for attention, and its peak memory.

    A call of all ranks at the end of the run; the last one writes. `shared` has sent the bytes; it
    is None where attention was Megatron's.
    """
    on_gpu = torch.cuda.is_available()  # without one, the whole process on the host
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_resident_bytes()
    memory = torch.tensor(peak, device="cuda" if on_gpu else "cpu")
    if dist.is_initialized():
        dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    writer = get_tensorboard_writer()
    # args.iteration is where training started; there is no curr_iteration if it never did.
    steps = getattr(args, "curr_iteration", -1) + 1 - args.iteration
    if writer is None or steps < 1:
        return
    writer.add_scalar("burst/peak-memory-bytes", int(memory), args.curr_iteration)
    if shared is not None:
        sent = shared.contexts.bytes_sent - shared.contexts.bytes_sent_in_evaluation
        writer.add_scalar("burst/bytes-sent-per-rank", sent / steps, args.curr_iteration)
        writer.add_scalar("burst/documents", shared.contexts.means.documents, args.curr_iteration)
        writer.add_scalar("burst/imbalance", shared.contexts.means.imbalance, args.curr_iteration)
    writer.flush()
