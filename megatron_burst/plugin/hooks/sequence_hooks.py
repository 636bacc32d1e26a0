"""Hooks of a model for what concerns whole sequences: documents and layouts of our own."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.attention.context import BurstContext
from megatron_burst.config import LayoutName
from megatron_burst.plans.layout import Layout, zigzag
from megatron_burst.plugin.attention.ahead import Ahead
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention, SharedState
from megatron_burst.plugin.attention.documents import Documents, read_documents
from megatron_burst.plugin.hooks.rotary import Positions, RotaryAtPositions
from megatron_burst.plugin.limits import recurrent_layers
from megatron_burst.plugin.models import NAMES, LanguageModel

_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")


class SequenceHooks:
    """A pre-wrap hook of Megatron's model builders, for documents and for other layouts.

    Append it to `pre_wrap_hooks` of a model's config. Around every call of a pipeline stage it
    hands the layers the micro-batch's documents, moves what the stage has per token to the layout
    of the configuration, and moves the losses back, so that loss masks and whatever is outside
    stay Megatron's.

    Args:
        shared: what the layers of the model share.
        ahead: is told when a forward is done.
        documents_apart: whether the ranks hold each document in a zigzag of its own also where
            `packed_seq_params` does not say how it is padded, as with --sft.
    """

    def __init__(
        self, shared: SharedState, ahead: Ahead | None = None, *, documents_apart: bool = False
    ) -> None:
        self._shared, self._ahead, self._apart = shared, ahead, documents_apart

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to all pipeline stages among `models` and return them.

        Raises:
            ValueError: a model that cannot follow.
        """
        for model in models:
            _check_model(model)
            _check_core_attention(model)
            context = self._shared.get_megatrons(model.config, model.pg_collection)
            _check_mtp(model.config, context.ranks)
            replace_rotary(model, Positions(context))
            hooks = _StageHooks(model, context, self._ahead, documents_apart=self._apart)
            model.register_forward_pre_hook(hooks.before, with_kwargs=True)
            model.register_forward_hook(hooks.after, with_kwargs=True)
            if self._ahead is not None:
                model.register_forward_hook(hooks.begin_the_next)
        self._shared.tokens_follow_layout = True
        return models


def _check_model(model: Any) -> None:
    what = f"documents and --burst-layout {LayoutName.SEGMENTED_ZIGZAG}"
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{what} need a {NAMES}, not a {type(model).__name__}")
    if found := recurrent_layers(getattr(model, "hybrid_layer_pattern", None)):
        raise ValueError(f"{what} cannot be followed by {found} layers")


def _check_mtp(config: Any, ranks: int) -> None:
    if ranks > 1 and config.mtp_num_layers:
        raise ValueError(
            f"mtp_num_layers = {config.mtp_num_layers}: over {ranks} context-parallel ranks "
            "Megatron moves tokens as in its zigzag of whole sequences; documents and "
            f"--burst-layout {LayoutName.SEGMENTED_ZIGZAG} have others: drop one of them"
        )


def _check_core_attention(model: torch.nn.Module) -> None:
    """Only ours knows which tokens are where."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        attention = getattr(module, "core_attention", None)
        if not isinstance(attention, BurstCoreAttention | IdentityOp | None):
            raise ValueError(
                f"documents and --burst-layout {LayoutName.SEGMENTED_ZIGZAG} need our attention in "
                f"every layer; layer {module.layer_number} has {type(attention).__name__}"
            )


def replace_rotary(model: torch.nn.Module, positions: Positions) -> None:
    """Put `RotaryAtPositions` in the place of every rotary embedding, of layers' too.

    Raises:
        ValueError: an embedding that takes its rows in another way.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
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
    """The two hooks of one pipeline stage."""

    def __init__(
        self,
        model: LanguageModel,
        context: BurstContext,
        ahead: Ahead | None = None,
        *,
        documents_apart: bool = False,
    ) -> None:
        self._group, self._ahead, self._apart = context.group, ahead, documents_apart
        moves = context.config.layout is not LayoutName.ZIGZAG and context.ranks > 1
        self._exchange = LayoutExchange(context) if moves else None
        config = model.config
        tensor_ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._ranks_of_a_sequence = context.ranks * tensor_ranks

    def read(self, packed: PackedSeqParams) -> Documents:
        """Make of what says where a micro-batch's documents are what its layers need to know.

        Everything but plans: `Ahead` makes those of it, and calls this in a thread.
        """
        return read_documents(packed, self._group, self._ranks_of_a_sequence, apart=self._apart)

    def before(
        self, model: LanguageModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Change the arguments of the model's forward."""
        given = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
        packed = given.get("packed_seq_params")
        if packed is not None:
            given["packed_seq_params"] = (
                self._ahead.take(packed, self.read) if self._ahead else self.read(packed)
            )
            _flatten_input(model.decoder)
        if self._exchange is not None:
            _check_output(model, given)
            for name in _PER_TOKEN:
                if given.get(name) is not None:
                    given[name] = self._exchange.to_ours(given[name])
        return (), given

    def after(
        self, model: LanguageModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Change the output of the model's forward."""
        if model.post_process:
            return output if self._exchange is None else self._losses_back(output, kwargs)
        documents = kwargs.get("packed_seq_params")
        return output if documents is None else _unflatten_output(output, documents)

    def begin_the_next(self, *_: object) -> None:
        """The device has a forward to run: prepare what comes after it."""
        if self._ahead is not None:
            self._ahead.begin(self.read)

    def _losses_back(self, losses: Tensor, kwargs: dict[str, Any]) -> Tensor:
        assert self._exchange is not None
        if losses.shape != kwargs["labels"].shape:
            raise ValueError(
                f"--burst-layout {LayoutName.SEGMENTED_ZIGZAG} moves the losses of tokens, "
                f"{tuple(kwargs['labels'].shape)}; the model returned {tuple(losses.shape)}"
            )
        return self._exchange.to_megatrons(losses)


def _check_output(model: LanguageModel, given: dict[str, Any]) -> None:
    if model.post_process and given.get("labels") is None:
        raise ValueError(
            f"--burst-layout {LayoutName.SEGMENTED_ZIGZAG}: without labels the model returns "
            f"logits, which are not moved back; take --burst-layout {LayoutName.ZIGZAG}"
        )


def _flatten_input(decoder: Any) -> None:
    """Undo `_unflatten_output` on the stage that receives."""
    arrived = decoder.input_tensor
    if arrived is not None and arrived.shape[1] > 1:
        decoder.set_input_tensor(arrived.view(-1, 1, arrived.shape[2]))


def _unflatten_output(output: Tensor, documents: Documents) -> Tensor:
    """Give what goes to the next stage the shape in which Megatron expects its gradient.

    Megatron flattens the samples of a micro-batch into one sequence, but its pipeline goes on
    counting samples.
    """
    if documents.samples == 1:
        return output
    shaped = output.view(-1, documents.samples, output.shape[2])
    return make_viewless_tensor(shaped, requires_grad=shaped.requires_grad, keep_graph=True)


def rows_elsewhere(held: Layout, wanted: Layout, rank: int) -> Tensor:
    """Return where `rank` finds its rows of layout `wanted` in the shards of layout `held`.

    The shards of all ranks stand one behind the other: int64 [local tokens].
    """
    where = torch.cat([held.positions(r) for r in range(held.ranks)]).argsort()
    return where[wanted.positions(rank)]


class LayoutExchange:
    """Moves rows between Megatron's zigzag and our layout; collective calls of a CP group.

    By an all-gather: token numbers and losses are a few bytes a token, attention sends thousands.
    """

    def __init__(self, context: BurstContext) -> None:
        self._context = context
        self._rows: dict[tuple[int, bool, torch.device], Tensor] = {}

    def to_ours(self, x: Tensor) -> Tensor:
        """Return this rank's rows in our layout of [batch, local tokens] in Megatron's zigzag.

        Differentiable, like its inverse.
        """
        return _Exchange.apply(x, self, True)

    def to_megatrons(self, x: Tensor) -> Tensor:
        """Undo `to_ours`."""
        return _Exchange.apply(x, self, False)

    def move(self, x: Tensor, to_ours: bool) -> Tensor:
        """Carry out one exchange."""
        group = self._context.group
        if group is None:
            return x
        x = x.contiguous()
        shards = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(shards, x, group=group)
        rows = self._find(x.shape[1] * group.size(), to_ours, x.device)
        return torch.cat(shards, dim=1).index_select(1, rows)

    def _find(self, tokens: int, to_ours: bool, device: torch.device) -> Tensor:
        key = tokens, to_ours, device
        if key not in self._rows:
            megatrons = zigzag(tokens, self._context.ranks)
            ways = (megatrons, self._context.layout(tokens))
            held, wanted = ways if to_ours else ways[::-1]
            self._rows[key] = rows_elsewhere(held, wanted, self._context.rank).to(device)
        return self._rows[key]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: LayoutExchange, to_ours: bool) -> Tensor:
        ctx.arguments = exchange, to_ours
        return exchange.move(x, to_ours)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, to_ours = ctx.arguments
        return exchange.move(grad, not to_ours), None, None
