"""Whether layers with a state pass it, from the arguments alone: before anything is built."""

import logging
from typing import Any

from megatron_burst.config import BurstConfig, LayoutName
from megatron_burst.plugin.attention.layer_algorithms import MEGATRONS
from megatron_burst.plugin.hooks.layer_moves import layer_kinds
from megatron_burst.plugin.refusals import cannot_follow, recurrent_layers
from megatron_burst.plugin.scans.bytes_sent import Sent, sent_by_model, shapes_in

logger = logging.getLogger(__name__)


def states_are_passed(args: Any, config: BurstConfig, *, documents: bool) -> bool:
    """Return whether M and G layers pass states on contiguous shards; logged where bytes say so.

    They must with documents and in any layout but zigzag; under auto they do where a rank sends
    fewer bytes by it, in all its layers and with the rows that move before and behind them.
    """
    if documents or not config.is_zigzag:
        return True
    if config.layout is LayoutName.ZIGZAG or args.context_parallel_size == 1:
        return False
    kinds = layer_kinds(args, args.hybrid_layer_pattern)
    if not (scans := recurrent_layers(kinds)) or _cannot_move(args):
        return False
    sent = sent_by_args(args, kinds)
    logger.info(
        "%s: a rank sends %.3g MiB a sequence and forward where states are passed and rows move to "
        "contiguous shards, %.3g MiB by an all-to-all over heads: --burst-layout %s takes %s",
        *(scans, sent.states / 2**20, sent.heads / 2**20, config.layout),
        "the former" if sent.states < sent.heads else "the latter",
    )
    return sent.states < sent.heads


def sent_by_args(args: Any, kinds: str) -> Sent:
    """Return what layers of these kinds send with these arguments of Megatron's."""
    ranks, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    number_bytes = 2 if args.bf16 or args.fp16 else 4
    tokens = args.seq_length // ranks
    moved = tokens * args.hidden_size * number_bytes // (tensor if args.sequence_parallel else 1)
    return sent_by_model(kinds, shapes_in(args, tensor), moved, tokens, ranks, number_bytes)


def _cannot_move(args: Any) -> bool:
    """Whether hooks that let rows move cannot be in the model, or would be passed by."""
    graphs = getattr(args, "cuda_graph_impl", None) not in (None, "none")
    passed_by = graphs or args.overlap_moe_expert_parallel_comm
    theirs = not set(MEGATRONS).isdisjoint(args.cp_comm_type or ())
    return passed_by or theirs or any(cannot_follow(args, "another layout"))
