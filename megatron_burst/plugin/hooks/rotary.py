"""Rotary embeddings at the positions of this rank's rows, whatever the layout and the documents."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.plans.layout import Layout


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """What decides the positions: the length of the whole sequence, and where documents begin."""

    tokens: int
    bounds: tuple[int, ...] | None
    layout: Layout | None = None


class Positions:
    """The positions of this rank's rows, each counted from the start of its document."""

    def __init__(self, context: BurstContext) -> None:
        self._context = context
        self._last: tuple[WholeSequence, Tensor] | None = None  # every layer may ask for the same
        self._on_device: dict[torch.device, Tensor] = {}  # of the last

    def of(self, sequence: WholeSequence) -> Tensor:
        """Return int64 [local tokens], on the host."""
        if self._last is None or self._last[0] != sequence:
            layout = sequence.layout or self._context.layout(sequence.tokens)
            positions = layout.positions(self._context.rank)
            if sequence.bounds is not None:
                positions = within_documents(positions, sequence.bounds)
            self._last, self._on_device = (sequence, positions), {}
        return self._last[1]

    def on(self, device: torch.device, sequence: WholeSequence) -> Tensor:
        """Return them on a device, copied once a sequence: the host waits for such a copy."""
        positions = self.of(sequence)
        if device not in self._on_device:
            self._on_device[device] = positions.to(device)
        return self._on_device[device]


def within_documents(positions: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """Count positions in a sequence from the starts of their documents."""
    starts = torch.tensor(bounds)
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

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: Any,
        packed_seq_params: Any = None,
        *,
        inference_params: Any = None,
    ) -> WholeSequence:
        """Return what `forward` needs to know."""
        if inference_context is not None or inference_params is not None:
            raise ValueError(
                "inference is not possible with documents or --burst-layout segmented-zigzag"
            )
        tokens = self.rotary.get_rotary_seq_len(
            None, transformer, transformer_input, transformer_config, None
        )
        given = (getattr(packed_seq_params, name, None) for name in ("bounds", "layout"))
        return WholeSequence(tokens, *given)

    def forward(self, sequence: WholeSequence, **_: Any) -> Any:
        """Return the embeddings [local tokens, 1, 1, d]; for YaRN also its scale."""
        positions = self._positions.of(sequence)
        table = self.rotary.get_emb(int(positions.max()) + 1)
        table, *scale = table if isinstance(table, tuple) else (table,)
        rows = table.index_select(0, self._positions.on(table.device, sequence))
        if self._in_layer and sequence.bounds is not None:
            rows = rows.squeeze(1)
        return (rows, *scale) if scale else rows
