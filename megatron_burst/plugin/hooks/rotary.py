"""Rotary embeddings at the positions of this rank's rows, whatever the layout and the documents."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.transport.pinned import to_device

_OF_DOCUMENTS = ("bounds", "layout", "longest", "rank")


class WholeSequence(NamedTuple):
    """What decides the positions: the length of the whole sequence, and where documents begin."""

    tokens: int
    bounds: tuple[int, ...] | None
    layout: Layout | None = None
    longest: int | None = None  # document; None: not known, so it may be all of it
    rank: int | None = None  # of this process in the layout; None: that of the model's own group


class Positions:
    """The positions of this rank's rows, each counted from the start of its document.

    They are found on the device, so that the host waits for no copy: a micro-batch brings the
    borders of its documents alone.
    """

    def __init__(self, context: BurstContext) -> None:
        self._context = context
        # Every layer of a micro-batch asks for the same.
        self.on = functools.lru_cache(1)(self._on)
        self.in_sequence = functools.lru_cache(1)(self._find)

    def _on(self, device: torch.device, sequence: WholeSequence) -> Tensor:
        """Return int64 [local tokens]."""
        layout = sequence.layout or self._context.layout(sequence.tokens)
        own = self.in_sequence(device, layout, sequence.rank)
        return own if sequence.bounds is None else within_documents(own, sequence.bounds)

    def _find(self, device: torch.device, layout: Layout, rank: int | None = None) -> Tensor:
        """Return int64 [local tokens], counted from the start of the sequence."""
        return to_device(layout.positions(self._context.rank if rank is None else rank), device)


def within_documents(positions: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Count positions in a sequence from the starts of their documents."""
    starts = to_device(torch.tensor(bounds), positions.device)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


class RotaryAtPositions(torch.nn.Module):
    """Stands in for a rotary embedding of Megatron, whose rows are those of its own zigzag.

    Megatron asks for the length of the sequence and gives the answer back to `forward`. Here the
    answer is a `WholeSequence`, so that nothing has to be remembered from one call to the other,
    and a layer that is computed again gets the rows that it had. `in_layer`: it belongs to a layer,
    MLA, which drops the batch dimension where there are documents.
    """

    def __init__(self, rotary: Any, positions: Positions, *, in_layer: bool = False) -> None:
        super().__init__()
        self.rotary, self._positions, self._in_layer = rotary, positions, in_layer

    def get_rotary_seq_len(self, inference_context: Any, *given: Any) -> WholeSequence:
        """Return what `forward` needs to know, of Megatron's arguments."""
        if inference_context is not None:
            raise ValueError(
                "inference is not possible with documents or --burst-layout segmented-zigzag"
            )
        *arguments, packed_seq_params = given
        tokens = self.rotary.get_rotary_seq_len(None, *arguments, None)
        of_documents = (getattr(packed_seq_params, name, None) for name in _OF_DOCUMENTS)
        return WholeSequence(tokens, *of_documents)

    def forward(self, sequence: WholeSequence, **_: Any) -> Any:
        """Return the embeddings [local tokens, 1, 1, d]; for YaRN also its scale."""
        table = self.rotary.get_emb(sequence.longest or sequence.tokens)
        table, *scale = table if isinstance(table, tuple) else (table,)
        embeddings = table.index_select(0, self._positions.on(table.device, sequence))
        if self._in_layer and sequence.bounds is not None:
            embeddings = embeddings.squeeze(1)
        return (embeddings, *scale) if scale else embeddings
