"""--burst-check reference: whether a rank's tokens are those of its positions."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.plugin.attention.documents import PackedDocuments
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.calls import after_calls
from megatron_burst.plugin.hooks.rotary import RotaryAtPositions, WholeSequence
from megatron_burst.plugin.models import LanguageModel
from megatron_burst.reference.verify import spread_of

logger = logging.getLogger(__name__)


class PositionHooks:
    """A pre-wrap hook of Megatron's model builders that looks at the positions of a model's tokens.

    Append it behind `SequenceHooks`. It compares the position ids of the first training batch, and
    the angles of every rotary embedding, with the positions that this rank's tokens have.

    Args:
        shared: the contexts of the model, and what takes the results.
        ids_begin_anew: whether the position ids are not those of the sequence or its documents.
    """

    def __init__(self, shared: SharedState, *, ids_begin_anew: bool = False) -> None:
        assert shared.verification is not None
        self._shared, self._texts = shared, shared.verification.positions
        self._ids_begin_anew = ids_begin_anew

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the pipeline stages of a model and return them."""
        for model in models:
            if not isinstance(model, LanguageModel):
                continue
            context = self._shared.contexts.of(model.config, model.pg_collection)
            if not self._ids_begin_anew:
                after_calls(model, _once(functools.partial(self._look_at_ids, context)))
            for module in model.modules():
                known = isinstance(module, RotaryEmbedding | RotaryAtPositions)
                if known and not isinstance(module, MultimodalRotaryEmbedding):
                    look = _once(functools.partial(self._look_at_angles, context))
                    module.register_forward_hook(look, with_kwargs=True)
        return models

    def _look_at_ids(
        self, context: BurstContext, _: LanguageModel, given: Mapping[str, Any], __: Any
    ) -> None:
        ids, packed = given.get("position_ids"), given.get("packed_seq_params")
        if ids is not None:
            documents = packed if isinstance(packed, PackedDocuments) else PackedDocuments()
            own = spread_of(context, ids.shape[1] * context.ranks, documents.layout).own
            expected = _within(own, documents.cu_seqlens_q)
            self._take("position ids", context, own, (ids.cpu() == expected).all(0))

    def _look_at_angles(
        self, context: BurstContext, module: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        angles = output[0] if isinstance(output, tuple) else output
        given = args[0] if args and isinstance(args[0], WholeSequence) else WholeSequence(0, None)
        own = spread_of(context, angles.shape[0] * context.ranks, given.layout).own
        positions = _within(own, None if given.bounds is None else torch.tensor(given.bounds))
        rotary = module.rotary if isinstance(module, RotaryAtPositions) else module
        whole = rotary.get_emb(int(positions.max()) + 1)
        whole = whole[0] if isinstance(whole, tuple) else whole
        expected = whole[positions.to(whole.device)].to(angles.device)
        same = angles.flatten(1) == expected.flatten(1)
        self._take("rotary angles", context, own, same.all(1).cpu())

    def _take(self, what: str, context: BurstContext, own: Tensor, same: Tensor) -> None:
        """Note which rows, at these positions of the sequence [local tokens], are as expected."""
        self._texts.setdefault(what, "")
        if same.all():
            return
        wrong = own[~same]
        rank = dist.get_rank() if dist.is_initialized() else 0
        text = (
            f"{what} on rank {rank} (context-parallel rank {context.rank}) are not those of its "
            f"tokens: {len(wrong)} of {len(same)} are wrong, of tokens {int(wrong.min())} to "
            f"{int(wrong.max())}"
        )
        logger.warning("burst check: %s", text)
        self._texts[what] = self._texts[what] or text


def _within(positions: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Count positions from the beginning of a document, if there are any."""
    if cu_seqlens is None:
        return positions
    begin = cu_seqlens.cpu().long()
    return positions - begin[torch.searchsorted(begin, positions, right=True) - 1]


def _once(look: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls `look` after the first forward of a module in training."""
    looks = [look]

    def hook(module: Any, *given: Any) -> None:
        if module.training and looks:
            looks.pop()(module, *given)

    return hook
