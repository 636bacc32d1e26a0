"""In which layout each layer of a model runs, by the kinds of its layers alone.

    pattern   M - G * E M *        M, G: scans; *, +: attention; others take what is there
    layout    s s s a a s a        and a before the first layer and behind the last

Rows move where the letter changes, so once at a border and not around a layer, and every pipeline
stage knows in which layout it receives: that in which the layer before ran.
"""

from collections.abc import Sequence
from enum import StrEnum

from megatron_burst.plans.visibility.layout import Layout


class Side(StrEnum):
    """Whose layout the rows have."""

    ATTENTION = "a"
    SCANS = "s"


_WANTED = dict.fromkeys("MG", Side.SCANS) | dict.fromkeys("*+/", Side.ATTENTION)


def sides(kinds: Sequence[str]) -> list[Side]:
    """Return where each layer runs, of the layers' symbols in their order; 0 is before the first.

    Layers without a layout of their own run in the one that is there; a `/` is the end of a stack,
    the decoder or one of MTP's depths. [symbols + 1]
    """
    per_layer = [Side.ATTENTION]
    for kind in kinds:
        per_layer.append(_WANTED.get(kind, per_layer[-1]))
    return per_layer


def moves(per_layer: Sequence[Side]) -> int:
    """Return how often rows move in a forward, on the way back behind the last layer, too."""
    return sum(a is not b for a, b in zip(per_layer, [*per_layer[1:], Side.ATTENTION], strict=True))


def over_tensor_ranks(layout: Layout, ranks: int) -> Layout:
    """Return what tensor-parallel ranks hold under sequence parallelism, [P * ranks] shards.

    Each has as many of its context-parallel rank's rows, in their order.
    """
    if ranks == 1:
        return layout
    size = layout.local_tokens // ranks
    cuts = (
        _cut(shard, rank * size, (rank + 1) * size)
        for shard in layout.shards
        for rank in range(ranks)
    )
    return Layout(tuple(cuts))


def _cut(shard: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """Return the positions of the rows `start` to `stop`."""
    parts = []
    for positions in shard:
        inside = positions[max(0, start) : max(0, stop)]
        start, stop = start - len(positions), stop - len(positions)
        parts.append(inside)
    return tuple(part for part in parts if part)
