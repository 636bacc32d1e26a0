"""Hooks of a model for what concerns whole sequences: documents and layouts of our own."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.config import LayoutName
from megatron_burst.plans.visibility.layout import Layout, contiguous, zigzag
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention, window_of
from megatron_burst.plugin.attention.documents import PackedDocuments, read_documents
from megatron_burst.plugin.attention.layouts import Layouts
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.calls import after_calls, before_calls
from megatron_burst.plugin.hooks.batch_cut import BatchCut
from megatron_burst.plugin.hooks.layer_moves import LayerMoves, kinds_of, stacks_of
from megatron_burst.plugin.hooks.mtp import Rolls
from megatron_burst.plugin.hooks.rotary import Positions, RotaryAtPositions
from megatron_burst.plugin.hooks.row_exchange import RowExchange
from megatron_burst.plugin.models import LanguageModel, need_language_models
from megatron_burst.plugin.refusals import recurrent_layers
from megatron_burst.plugin.scans.layer import OTHER_GROUP, layer_apart

_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
_EXCHANGES_KEPT = 16  # stages of a pipeline have several micro-batches under way

# Over whom a micro-batch runs, the bounds of its documents, and the layouts in which their tokens
# come and in which attention runs.
type _Where = tuple[BurstContext, tuple[int, ...], Layout | None, Layout | None]


class SequenceHooks:
    """A pre-wrap hook of Megatron's model builders, for documents and for other layouts.

    Append it to `pre_wrap_hooks` of a model's config. Around every call of a pipeline stage it
    hands the layers the micro-batch's documents. What the stage has per token, unless it was cut by
    our layout, moves there, and losses or logits move back, so that loss masks and whatever is
    outside stay Megatron's.

    Args:
        shared: what the layers of the model share.
        cut: cuts the batches; None: they come in Megatron's zigzag.
        documents_apart: whether the ranks hold each document in a zigzag of its own also where
            `packed_seq_params` does not say how it is padded, as with --sft.
    """

    def __init__(
        self, shared: SharedState, cut: BatchCut | None = None, *, documents_apart: bool = False
    ) -> None:
        self._shared, self._apart, self._cut = shared, documents_apart, cut

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the pipeline stages of a model and return them."""
        layouts: dict[BurstContext, Layouts] = {}  # one for all stages of a pipeline
        need_language_models("documents, and layouts other than zigzag: SequenceHooks", models)
        for model in models:
            config = model.config
            context = self._shared.contexts.of(config, model.pg_collection)
            _check_core_attention(model)
            positions = Positions(context)
            replace_rotary(model, positions)
            queries_a_key = config.num_attention_heads // config.num_query_groups
            layout = Layouts(context, _window_of_all(config), queries_a_key)
            layout = layouts.setdefault(context, layout)
            stage = _StageHooks(model, layout, self._shared, self._cut, self._apart)
            stage.let_layers_differ()
            moves = not self._shared.config.is_zigzag and context.ranks > 1
            if moves and self._cut is not None:
                self._cut.follow(stage.layout_of, positions.in_sequence)
        self._shared.follow_layout()
        return models


def _check_core_attention(model: Any) -> None:
    """Only ours knows which tokens are where."""
    for module in model.modules():
        attention = getattr(module, "core_attention", None)
        if not isinstance(attention, BurstCoreAttention | IdentityOp | None):
            raise ValueError(
                "documents, and layouts other than zigzag, need our attention in every layer; "
                f"layer {module.layer_number} has {type(attention).__name__}"
            )


def _window_of_all(config: Any) -> int | None:
    """Return how many keys before it a query sees, where that is the same in every layer."""
    windows = {window_of(config, 1 + layer)[0] for layer in range(config.num_layers)}
    return windows.pop() if len(windows) == 1 else None


def replace_rotary(model: Any, positions: Positions) -> None:
    """Put `RotaryAtPositions` in the place of every rotary embedding, of layers' too.

    Raises:
        ValueError: an embedding that takes its rows in another way.
    """
    for module in [*model.modules()]:
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, MultimodalRotaryEmbedding):
            raise ValueError(
                "--position-embedding-type mrope cannot follow documents or another layout"
            )
        if isinstance(rotary, RotaryEmbedding):
            in_layer = module is not model
            if in_layer and module.config.apply_rope_fusion:
                raise ValueError(
                    "fused rotary embeddings of MLA cannot follow documents or another layout: "
                    "pass --no-rope-fusion"
                )
            module.rotary_pos_emb = RotaryAtPositions(rotary, positions, in_layer=in_layer)


class _StageHooks:
    """The hooks of one pipeline stage."""

    def __init__(
        self,
        model: LanguageModel,
        layouts: Layouts,
        shared: SharedState,
        cut: BatchCut | None = None,
        documents_apart: bool = False,
    ) -> None:
        config, context = model.config, layouts.context
        self._model, self._layouts, self._context = model, layouts, context
        self._shared, self._cut, self._apart = shared, cut, documents_apart
        self._tensor_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._refused = ""
        self._layer_moves: LayerMoves | None = None
        self._rolls = Rolls(model) if config.mtp_num_layers and context.ranks > 1 else None
        self._exchange = functools.lru_cache(_EXCHANGES_KEPT)(self._make_exchange)
        before_calls(model, self.before)
        after_calls(model, self.after)

    def let_layers_differ(self) -> None:
        """Move rows where layers change from attention's layout to that of scans, and back.

        Raises:
            ValueError: a layer that rows would move for cannot follow, or the other way round.
        """
        scans = recurrent_layers(kinds_of(self._model))
        moves = self._shared.passes_states and self._context.ranks > 1
        fault = layer_apart(stacks_of(self._model), rows_move=moves)
        if moves and fault:
            raise ValueError(fault)
        if moves and scans:
            self._layer_moves = LayerMoves(self._model, self._context, self._shared.scan_layout)
        elif scans and self._context.ranks > 1:
            self._refused = f"documents and {scans} layers need a SharedState with moves=True"
        else:
            self._refused = fault

    def layout_of(self, batch: Mapping[str, Any], tokens: int) -> Layout | None:
        """Return the layout for a whole batch; None where each document is in zigzag by itself."""
        bounds, padded = (
            None if (x := batch.get(name)) is None else x.squeeze(0)
            for name in ("cu_seqlens", "cu_seqlens_padded")
        )
        if bounds is None:
            return self._context.layout(tokens)
        said = PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_q_padded=padded)
        documents = self._read(said, self._context)
        return None if documents.brought else documents.layout or self._context.layout(tokens)

    def before(self, model: LanguageModel, given: dict[str, Any]) -> dict[str, Any]:
        """Change the arguments of the model's forward."""
        packed = given.get("packed_seq_params")
        context = self._shared.contexts.of_micro_batch(packed, self._context)
        if self._layer_moves is not None and context is not self._context:
            # A layer says so, too, but behind the exchange, where other ranks would wait.
            raise ValueError(f"M and G layers carry a state {OTHER_GROUP}")
        if packed is not None:
            if self._refused:
                raise ValueError(self._refused)
            given["packed_seq_params"] = self._read(packed, context)
            _flatten_input(model.decoder)
        if self._layer_moves is not None and (mask := given.get("padding_mask")) is not None:
            layout = getattr(given.get("packed_seq_params"), "layout", None)
            self._layer_moves.check(mask.shape[1] * self._context.ranks, layout)
        tensors = _per_token(given)
        if tensors and context.group is not None:
            exchange = self._exchange_of(tensors, given)
            if exchange.is_needed and given.get("decoder_input") is not None:
                raise ValueError(
                    "decoder_input stays where it is while the tokens move to another layout: let "
                    f"the model embed its tokens, or take --burst-layout {LayoutName.ZIGZAG}"
                )
            given |= exchange.to_ours(tensors)
            if self._rolls is not None:
                self._rolls.begin(exchange)
        return given

    def after(self, model: LanguageModel, given: dict[str, Any], output: Tensor) -> Tensor:
        """Change the output of the model's forward."""
        if not model.post_process:
            return _unflatten_output(output, given.get("packed_seq_params") or PackedDocuments())
        packed = given.get("packed_seq_params")
        if self._shared.contexts.of_micro_batch(packed, self._context).group is None:
            return output
        tensors = _per_token(given) or {"output": output}
        exchange, shape = self._exchange_of(tensors, given), next(iter(tensors.values())).shape[:2]
        if exchange.is_needed and output.shape[:2] != shape:
            raise ValueError(
                f"--burst-layout {self._context.config.layout} moves what the model returns for "
                f"each token, {tuple(shape)}; it returned {tuple(output.shape)}"
            )
        return exchange.to_callers(output)

    def _exchange_of(self, tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> RowExchange:
        """Return the moves of the micro-batch of these tensors [batch, rows, ...]."""
        documents = given.get("packed_seq_params") or PackedDocuments()
        cut = None if self._cut is None else self._cut.layout_of(tensors.values())
        context = self._shared.contexts.of_micro_batch(documents, self._context)
        where = context, documents.bounds, cut or documents.brought, documents.layout
        x = next(iter(tensors.values()))
        return self._exchange(x.shape[1] * context.ranks, where, x.device)

    def _make_exchange(self, tokens: int, where: _Where, device: torch.device) -> RowExchange:
        context, bounds, brought, layout = where
        if bounds and bounds[-1] != tokens:
            raise ValueError(f"the documents end at {bounds[-1]}, the sequence has {tokens} tokens")
        assert context.group is not None
        callers, ours = brought or zigzag(tokens, context.ranks), layout or context.layout(tokens)
        return RowExchange(context.group, callers, ours, bounds or (0, tokens), device)

    def _read(self, packed: PackedSeqParams, context: BurstContext) -> PackedDocuments:
        is_own = context is self._context
        if not is_own and self._model.config.mtp_num_layers:
            raise ValueError(
                "packed_seq_params brings another cp_group than the model's, over whose tokens MTP "
                "takes its losses: drop --mtp-num-layers"
            )
        documents = read_documents(
            packed,
            context.group,
            context.ranks * self._tensor_ranks,
            apart=self._apart,
            layout_of=(self._layouts if is_own else self._layouts.beside(context)).of,
            moves=context.config.layout is LayoutName.CONTIGUOUS,
        )
        if not is_own:
            tokens = documents.bounds[-1]
            usual = context.layout(tokens) if context.ranks > 1 else contiguous(tokens, 1)
            documents.layout, documents.rank = documents.layout or usual, context.rank
            documents.cp_group, documents.local_cp_size = packed.cp_group, packed.local_cp_size
        return documents


def _per_token(given: dict[str, Any]) -> dict[str, Tensor]:
    return {name: given[name] for name in _PER_TOKEN if given.get(name) is not None}


def _flatten_input(decoder: Any) -> None:
    """Undo `_unflatten_output` on the stage that receives."""
    arrived = decoder.input_tensor
    if arrived is not None and arrived.shape[1] > 1:
        decoder.set_input_tensor(arrived.view(-1, 1, arrived.shape[2]))


def _unflatten_output(output: Tensor, documents: PackedDocuments) -> Tensor:
    """Give what goes to the next stage the shape in which Megatron expects its gradient.

    Megatron flattens the samples of a micro-batch into one sequence, but its pipeline goes on
    counting samples.
    """
    if documents.samples == 1:
        return output
    shaped = output.view(-1, documents.samples, output.shape[2])
    return make_viewless_tensor(shaped, requires_grad=shaped.requires_grad, keep_graph=True)
