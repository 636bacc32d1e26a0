"""Says at the start of a training what keeping a part of attention's results will cost and save."""

import argparse
import logging
from typing import Any

from megatron.core.models.gpt import GPTModel

from megatron_burst.attention.context import BurstContext
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import mib
from megatron_burst.plans.recompute import boundary
from megatron_burst.plans.recompute_cost import Prediction, passes_in_flight, predict
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention, ContextPool

logger = logging.getLogger(__name__)


class RecomputeLog:
    """A pre-wrap hook of Megatron's model builders that logs the prediction on the first rank.

    That rank is of the first pipeline stage, where most micro-batches are in flight. It counts
    samples as wholes: where the documents in them begin is not known before they are read.
    """

    def __init__(self, pool: ContextPool, args: argparse.Namespace) -> None:
        self._pool, self._args = pool, args

    def __call__(self, models: list[Any]) -> list[Any]:
        """Log one line for each mask and algorithm of layers of `models`; return the models."""
        chunks = [model for model in models if isinstance(model, GPTModel)]
        if self._args.rank == 0 and chunks:
            for line in self._lines(chunks):
                logger.info("%s", line)
        return models

    def _lines(self, chunks: list[GPTModel]) -> list[str]:
        config = chunks[0].config
        layers = [[m for m in c.modules() if isinstance(m, BurstCoreAttention)] for c in chunks]
        if not any(layers):
            return []
        args, fraction = self._args, self._pool.config.recompute_fraction
        assert fraction is not None
        samples, flat = args.micro_batch_size, bool(args.dataloader_inter_document_masking)
        length = args.seq_length * samples if flat else args.seq_length
        bounds = tuple(range(0, length + 1, args.seq_length)) if flat else None
        kinds = {
            (m.context, m.mask_of(bounds, samples if flat else 1)): None for c in layers for m in c
        }
        found = []
        for context, mask in kinds:
            shape = _shape(config, context, length // context.ranks * (1 if flat else samples))
            found.append(predict_layer(context, mask, shape, length, fraction))
        held = _checkpointed(config, max(map(len, layers))) * passes_in_flight(
            config.pipeline_model_parallel_size, len(chunks), _micro_batches(args)
        )
        total = mib(held * max(max(p.kept) for p in found))
        several = len({context for context, _ in kinds}) > 1
        ours = [
            f"burst recompute, {f'{context.config.algorithm}, ' if several else ''}{mask}: {each}"
            for (context, mask), each in zip(kinds, found, strict=True)
        ]
        ours[-1] += f"; at most {held} such results are kept at once, {total} in all"
        return ours


def predict_layer(
    context: BurstContext, mask: Mask, shape: Shape, length: int, fraction: float
) -> Prediction:
    """Return the prediction for one layer whose sequence has `length` tokens over all ranks."""
    layout = context.layout(length)
    ring = context.heads.ring_layout(layout)
    stop = boundary(layout, fraction)
    places = context.nodes, context.along_grid
    return predict(context.config, ring, mask, context.grid, shape, stop, *places)


def _shape(config: Any, context: BurstContext, tokens: int) -> Shape:
    """Return the shape of a rank's tensors as they are in the ring."""
    tensor, heads = config.tensor_model_parallel_size, context.heads.size
    queries = config.num_attention_heads // tensor
    keys = max(config.num_query_groups // tensor, 1)
    dims = (config.kv_channels, config.kv_channels)
    if config.multi_latent_attention:
        queries_and_keys = config.qk_head_dim + config.qk_pos_emb_head_dim
        keys, dims = queries, (queries_and_keys, config.v_head_dim)
    keys *= kv_head_copies(queries, keys, heads)
    wide, narrow = accumulation_dtype(config.params_dtype).itemsize, config.params_dtype.itemsize
    return Shape(tokens * heads, queries // heads, keys // heads, *dims, narrow, wide, wide)


def _checkpointed(config: Any, layers: int) -> int:
    """Of the layers of a model chunk, how many Megatron checkpoints."""
    if config.recompute_method == "block":
        return min(layers, config.recompute_num_layers)
    return layers


def _micro_batches(args: argparse.Namespace) -> int:
    return args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
