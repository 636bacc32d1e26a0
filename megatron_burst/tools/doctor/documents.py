"""What is known to go wrong with documents: whether attention, positions and ranks follow them."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_burst.config import Algorithm, BurstConfig, LayoutName
from megatron_burst.plans.balance.balanced import BOUND, imbalance
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.doctor.finding import Finding, Level

DOCUMENTS = "--dataloader-inter-document-masking"
BURST = "--context-parallel-algo burst"
_LOOKED_AT, _DRAWN = 64, 4  # documents, micro-batches
_ERROR, _WRONG, _WARNING, _NOTE = Level


def findings(args: Namespace, config: BurstConfig | None) -> Iterator[Finding]:
    """Yield what every check has to say; `config` is None under Megatron's own attention."""
    from megatron_burst.data_checks.data_files import readable_indexes  # imports Megatron

    indexes = [*readable_indexes(args)]
    yield from _positions(args)
    yield from _ends(args, indexes)
    meant = args.reset_position_ids or args.eod_mask_loss
    if args.dataloader_inter_document_masking:
        yield from _megatrons(args) if config is None else _ours(args, config, indexes)
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


def _ends(args: Namespace, indexes: list[tuple[str, Any]]) -> Iterator[Finding]:
    """Flags that look for end tokens, which `preprocess_data.py` writes with --append-eod alone."""
    names = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")
    asked = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    for prefix, index in indexes if asked else ():
        first = index.sequence_pointers[:_LOOKED_AT] // index.dtype_size
        last = first + index.sequence_lengths[:_LOOKED_AT] - 1
        tokens = np.memmap(f"{prefix}.bin", index.dtype, "r")
        if len(np.unique(tokens[last])) > 1:
            text = f"{' and '.join(asked)}: documents of {prefix} do not all end with one token"
            yield Finding("no-end-tokens", _WRONG, text, "preprocess_data.py --append-eod")


def _megatrons(args: Namespace) -> Iterator[Finding]:
    if args.transformer_impl == "local":
        text = "Megatron's local attention asserts in the first step that no sequences are packed"
        yield Finding("stock-documents", _ERROR, text, BURST)
    elif args.context_parallel_size > 1 and {*(args.cp_comm_type or ["p2p"])} & {"p2p", "a2a"}:
        text = (
            "Megatron splits the whole sequence among the ranks, TransformerEngine takes every "
            "document for split: queries meet the wrong keys"
        )
        yield Finding("stock-documents", _WRONG, text, BURST)


def _ours(
    args: Namespace, config: BurstConfig, indexes: list[tuple[str, Any]]
) -> Iterator[Finding]:
    if config.block_mask:
        text = (
            "--burst-block-mask counts blocks from the start of a sample, not of its documents: "
            "a block that all others may see is seen by its own documents alone"
        )
        yield Finding("blocks-of-samples", _WARNING, text, f"drop one of it and {DOCUMENTS}")
    if indexes and (found := _imbalance(args, config, indexes)) > BOUND:
        text = f"with this data's documents the busiest rank computes {found:.2f} times the mean"
        yield Finding("uneven-documents", _WARNING, text, f"--burst-layout {LayoutName.BALANCED}")


def _imbalance(args: Namespace, config: BurstConfig, indexes: list[tuple[str, Any]]) -> float:
    """Return FLOPs max/mean of micro-batches of documents drawn at random."""
    ranks = args.context_parallel_size // (config.head_parallel_size or 1)
    tokens = (args.seq_length or 0) * (args.micro_batch_size or 0)
    is_zigzag = config.layout is LayoutName.ZIGZAG and config.algorithm is not Algorithm.ULYSSES
    if not (tokens and is_zigzag):
        return 1.0
    lengths = np.concatenate([index.sequence_lengths for _, index in indexes])
    layout, rng, found = zigzag(tokens, ranks), np.random.default_rng(0), []
    for _ in range(_DRAWN):
        drawn = rng.choice(lengths, 2 * tokens // max(int(lengths.mean()), 1) + 16)
        ends = np.cumsum(drawn, dtype=np.int64)
        mask = Mask.causal(documents=[0, *ends[ends < tokens].tolist(), tokens])
        found.append(imbalance(layout, mask))
    return float(np.mean(found))
