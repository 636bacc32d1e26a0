"""Masks and layouts to try: each mask with the matrix that it stands for, and that of tiles."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.visibility.layout import (
    Layout,
    contiguous,
    segmented_zigzag,
    striped,
    zigzag,
)
from megatron_burst.plans.visibility.mask import Mask
from tests import oracle
from tests.plans.simulator import Tile


@dataclass(frozen=True)
class Masking:
    """A mask in words that the oracle understands, too."""

    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    table: tuple[tuple[bool, ...], ...] | None = None
    lengths: tuple[int, ...] | None = None  # of the documents without padding

    @property
    def mask(self) -> Mask:
        make = Mask.causal if self.causal else Mask.full
        packed = {"documents": self.documents, "lengths": self.lengths}
        return make(window=self.window, block_table=self._table, **packed)

    def visible(self, tokens: int) -> Tensor:
        given = self.causal, self.window, self.documents, self._table, self.lengths
        return oracle.visible_pairs(tokens, *given)

    @property
    def _table(self) -> Tensor | None:
        return None if self.table is None else torch.tensor(self.table)

    def __str__(self) -> str:
        return str(self.mask)


def _balanced(tokens: int, ranks: int) -> Layout:
    """Ranges of many lengths, made for documents of a token, a third of the others and the rest.

    On two nodes or more, so that the rows of a rank are not in the order of the sequence.
    """
    documents = sorted({0, 1, 1 + (tokens - 1) // 3, tokens})
    return balanced(
        Mask.causal(documents=documents), tokens, [rank // 2 for rank in range(ranks)]
    ).layout


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "zigzag": zigzag,
    "segmented zigzag": lambda tokens, ranks: segmented_zigzag([tokens // 2] * 2, ranks),
    "contiguous": contiguous,
    "striped": striped,
    "balanced": _balanced,
}


def times_seen(tiles: Iterable[Tile], tokens: int) -> Tensor:
    """How often tiles compute each pair of local rows of two ranks: int [tokens, tokens]."""
    times = torch.zeros(tokens, tokens, dtype=torch.int)
    for tile in tiles:
        queries, keys = tile.query_rows, tile.key_rows
        seen = tile.band.visible(queries.length, keys.length)
        times[queries.as_slice, keys.as_slice] += torch.from_numpy(seen)
    return times


def dealt(order: Sequence[int], size: int) -> Layout:
    """Give each rank the next four chunks of this size in `order`, in this order."""
    hands = (order[i : i + 4] for i in range(0, len(order), 4))
    return Layout(tuple(tuple(range(c * size, (c + 1) * size) for c in hand) for hand in hands))


def documents_of(lengths: Sequence[int]) -> tuple[int, ...]:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    assert all(a < b for a, b in pairwise(bounds))
    return tuple(bounds)


@st.composite
def maskings(draw: st.DrawFn, tokens: int) -> Masking:
    """Any mask of a sequence of this length, every kind of restriction or none."""
    window = draw(st.none() | st.integers(0, tokens + 2))
    cuts = draw(
        st.none() | st.sets(st.sampled_from(range(1, tokens)), max_size=tokens // 2)
        if tokens > 1
        else st.none()
    )
    documents = None if cuts is None else (0, *sorted(cuts), tokens)
    lengths = None
    if documents is not None and draw(st.booleans()):
        lengths = tuple(draw(st.integers(0, stop - start)) for start, stop in pairwise(documents))
    blocks = draw(st.none() | st.sampled_from([n for n in range(1, 9) if tokens % n == 0]))
    table = None
    if blocks is not None:
        bits = st.lists(st.booleans(), min_size=blocks, max_size=blocks)
        table = tuple(tuple(draw(bits)) for _ in range(blocks))
    return Masking(draw(st.booleans()), window, documents, table, lengths)


def hard_maskings(ranks: int, chunk: int) -> dict[str, Masking]:
    """What has gone wrong elsewhere, for a zigzag of chunks of this many tokens."""
    tokens = 2 * ranks * chunk
    blocks = 2 * ranks
    sparse = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(ranks)) < 0.4
    sparse[blocks // 2] = False  # a row of blocks that see nothing
    table = tuple(tuple(row) for row in sparse.tolist())
    borders = documents_of([chunk] * blocks)
    ends = (2 * chunk - 1, 2 * chunk, 1, 0)
    padded = tuple(ends[i % 4] for i in range(ranks))
    off_by_one = tuple(sorted({0, *(min(b + 1, tokens - 1) for b in borders[1:-1]), tokens}))
    return {
        "window of 0": Masking(window=0),
        "window of 1": Masking(window=1),
        "window of a chunk less 1": Masking(window=max(chunk - 1, 0)),
        "window of a chunk": Masking(window=chunk),
        "window of a chunk and 1": Masking(window=chunk + 1),
        "window of more than the sequence": Masking(window=tokens + 5),
        "full with a window": Masking(False, window=chunk),
        "documents of one token": Masking(documents=tuple(range(tokens + 1))),
        "documents that end with the chunks": Masking(documents=borders),
        "documents that end one off": Masking(documents=off_by_one),
        "one document": Masking(documents=(0, tokens)),
        "a short and a long document": Masking(documents=(0, 1, tokens)),
        "full documents": Masking(False, documents=borders),
        "documents with padding": Masking(documents=borders[::2], lengths=padded),
        "full documents with padding": Masking(False, documents=borders[::2], lengths=padded),
        "a window in documents": Masking(window=chunk, documents=off_by_one),
        "blocks": Masking(table=table),
        "full blocks": Masking(False, table=table),
        "blocks that see nothing": Masking(False, table=((False,) * blocks,) * blocks),
        "a window in blocks": Masking(window=chunk + 1, table=table),
        "everything at once": Masking(window=chunk, documents=off_by_one, table=table),
    }
