"""Cuts whole batches by our layouts where Megatron cuts them, so that no row moves in the model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_burst.config import LayoutName
from megatron_burst.plans.visibility.layout import Layout

PER_TOKEN = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")


class BatchCut:
    """Stands in for Megatron's `get_batch_on_this_cp_rank`, which has a whole sample on every rank.

    It is Megatron's own until a model has another layout than zigzag. Tensors that it cut are known
    by their storage, so that the model's hooks move those of others alone.
    """

    def __init__(self, original: Callable[..., dict[str, Any]]) -> None:
        self.original = original
        self._layout_of: Callable[[Mapping[str, Any], int], Layout | None] = lambda *_: None
        self._positions: Callable[[torch.device, Layout], Tensor]
        self._cut = WeakIdKeyDictionary()  # the layout, by storage
        self._has_cut = False

    def follow(
        self,
        layout_of: Callable[[Mapping[str, Any], int], Layout | None],
        positions: Callable[[torch.device, Layout], Tensor],
    ) -> None:
        """Cut from now on by the layout of a batch of so many tokens; None leaves it to Megatron.

        `positions` are those of this rank's tokens in it.
        """
        self._layout_of, self._positions = layout_of, positions

    def __call__(self, batch: dict[str, Any], *given: Any, **options: Any) -> dict[str, Any]:
        """Return the batch with this rank's part of [batch, tokens], as Megatron's own does."""
        whole = {name: batch[name] for name in PER_TOKEN if batch.get(name) is not None}
        layout = self._layout_of(batch, next(iter(whole.values())).shape[1]) if whole else None
        if layout is None:
            return self.original(batch, *given, **options)
        batch = dict(batch)  # Megatron's rerun machine hands out the one it keeps: not twice
        for name, x in whole.items():
            batch[name] = x.index_select(1, self._positions(x.device, layout))
            self._cut[batch[name].untyped_storage()] = layout
        self._has_cut = True
        return batch

    def layout_of(self, tensors: Iterable[Tensor]) -> Layout | None:
        """Return the layout in which these tensors of one micro-batch were cut; None: elsewhere.

        One that is known stands for all, for a loss mask may have been cast on its way.

        Raises:
            ValueError: other batches were cut here, and none of these tensors was.
        """
        layouts = (self._cut.get(x.untyped_storage()) for x in tensors)
        known: Layout | None = next((layout for layout in layouts if layout is not None), None)
        if known is None and self._has_cut:
            raise ValueError(
                "the model is given tokens that are not those which get_batch_on_this_cp_rank has "
                "cut, so their order is not known: hand over what it returns, or take "
                f"--burst-layout {LayoutName.ZIGZAG}"
            )
        return known
