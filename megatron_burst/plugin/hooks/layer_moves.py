"""Moves the rows of hidden states where layers of a model run in different layouts."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
)
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.config import refuse
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plugin.hooks.layer_layouts import Side, moves, over_tensor_ranks, sides
from megatron_burst.plugin.hooks.row_exchange import Moves, carry, find_moves
from megatron_burst.plugin.limits import GATED_DELTA_NETS
from megatron_burst.plugin.models import mtp_layers

logger = logging.getLogger(__name__)

_KEPT = 32  # two ways, of the micro-batches that are under way


class LayerMoves:
    """Stands in for the forward of those layers of a stage before which rows move.

    Inside of it, so that whoever looks at what a layer is given sees what the layer before it
    returned. A checkpoint that begins with the layer saves the rows before they move. Between
    stages they cross in the layout of the layer before.

    Args:
        model: a pipeline stage over two or more context-parallel ranks.
        context: theirs.
        scans: makes the layout of layers with a state, of the tokens and the number of ranks.

    Raises:
        ValueError: sequence parallelism whose ranks are in another order, or a training that runs
            no forward of layers.
    """

    def __init__(
        self, model: Any, context: BurstContext, scans: Callable[[int, int], Layout]
    ) -> None:
        self._context, self._scans = context, scans
        config, groups = model.config, model.pg_collection
        refuse(_refusals(config))
        self._spread = config.tensor_model_parallel_size if config.sequence_parallel else 1
        assert context.group is not None
        self._group: dist.ProcessGroup = groups.tp_cp if self._spread > 1 else context.group
        self._moves_of = functools.lru_cache(_KEPT)(self._find)
        self._kinds = kinds_of(model)
        self._count = moves(sides(self._kinds))
        if self._spread > 1 and self._group.rank() != (
            context.rank * self._spread + groups.tp.rank()
        ):
            raise ValueError(
                "rows move between layers under --sequence-parallel where the ranks of tp_cp are "
                "those of tp for each of cp, as Megatron's are in its default order"
            )
        for stack, kinds in stacks_of(model):
            is_last = model.post_process or stack is not model.decoder
            self._attach(stack, kinds, is_last=is_last)

    def _attach(self, stack: Any, kinds: Any, *, is_last: bool) -> None:
        per_layer = sides(kinds)
        for layer in stack.layers:
            held, wanted = per_layer[layer.layer_number - 1 : layer.layer_number + 1]
            if held is not wanted:
                layer.forward = self._moved_first(layer.forward, held, wanted)
        if is_last and per_layer[-1] is not Side.ATTENTION:
            stack.register_forward_hook(self._moved_back, with_kwargs=True)

    def check(self, tokens: int, layout: Layout | None) -> None:
        """Refuse the padding mask of a micro-batch that experts would read in another layout."""
        pairs = zip(self._kinds, sides(self._kinds)[1:], strict=True)
        apart = any(kind == "E" and side is Side.SCANS for kind, side in pairs)
        ours = [self._layout(side, tokens, layout) for side in Side]
        if apart and ours[0] != ours[1]:
            raise ValueError(
                "padding_mask stays in the layout of attention while hidden states move before "
                f"experts of the pattern {self._kinds}: put an attention layer before them"
            )

    def _moved_first(
        self, forward: Callable[..., Any], held: Side, wanted: Side
    ) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            hidden = args[0] if args else named.pop("hidden_states")
            moved = self.move(hidden, held, wanted, named.get("packed_seq_params"))
            return forward(moved, *args[1:], **named)

        return run

    def _moved_back(self, _: Any, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        packed = kwargs.get("packed_seq_params")
        return self.move(output, Side.SCANS, Side.ATTENTION, packed)

    def move(self, hidden: Tensor, held: Side, wanted: Side, packed: Any) -> Tensor:
        """Return the hidden states [rows, batch, hidden] in the other layout; differentiable.

        An all-to-all: a rank takes for a moment three times their memory. Nothing runs beside it,
        for all that follows reads its rows, and their gradients all that comes before.
        """
        layout = getattr(packed, "layout", None)
        tokens = len(hidden) * self._spread * self._context.ranks
        row_moves = self._moves_of(held, wanted, tokens, layout, hidden.device)
        if row_moves is None:
            return hidden
        if self._context.should_log((LayerMoves, tokens)):
            logger.info(
                "layers of two layouts: rows move %d times a forward, between the layers %s; "
                "each time this rank sends %.3g MiB, backward as well",
                *(self._count, self._kinds),
                row_moves.rows_sent(self._group.rank()) * hidden[0].nbytes / 2**20,
            )
        return carry(hidden, row_moves, self._group)

    def _find(
        self, held: Side, wanted: Side, tokens: int, layout: Layout | None, device: torch.device
    ) -> Moves | None:
        pair = [self._layout(side, tokens, layout) for side in (held, wanted)]
        if pair[0] == pair[1]:
            return None
        before, after = (over_tensor_ranks(each, self._spread) for each in pair)
        return find_moves(before, after, self._group.rank()).on(device)

    def _layout(self, side: Side, tokens: int, layout: Layout | None) -> Layout:
        if side is Side.SCANS:
            return self._scans(tokens, self._context.ranks)
        return layout or self._context.layout(tokens)


def _refusals(config: Any) -> Iterator[str]:
    what = "rows move between layers of two layouts in the forward of a layer, which"
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        plans = "Megatron's schedule plans do not call: drop --overlap-moe-expert-parallel-comm"
        yield f"{what} {plans}"
    if getattr(config, "cuda_graph_impl", None) == "transformer_engine":
        yield f"{what} --cuda-graph-impl transformer_engine passes by: take local, or drop it"


def stacks_of(model: Any) -> Iterator[tuple[Any, Sequence[str]]]:
    """Yield the stacks of a pipeline stage, and the symbols of the layers that theirs are among.

    A layer's number, from 1, says which is its own.
    """
    yield model.decoder, kinds_of(model).partition("/")[0]
    for stack in (layer.mtp_model_layer for layer in mtp_layers(model)):
        if hasattr(stack, "layer_type_list"):  # of a HybridModel
            yield stack, stack.layer_type_list


def kinds_of(model: Any) -> str:
    """Return the symbols of all layers of a model that is built; see `layer_kinds`."""
    return layer_kinds(model.config, getattr(model, "hybrid_layer_pattern", None))


def layer_kinds(sizes: Any, pattern: str | None) -> str:
    """Return the symbols of all layers of a model, of all its stages; `/` before MTP's depths.

    By Megatron's arguments or a TransformerConfig; a GPTModel has no pattern.
    """
    if pattern is not None:
        return pattern.replace("|", "")
    if sizes.experimental_attention_variant not in GATED_DELTA_NETS:
        return "*" * int(sizes.num_layers)
    return "".join("G" if linear else "*" for linear in get_linear_attention_pattern(sizes))
