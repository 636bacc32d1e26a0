"""What ranks see of each other where documents are each in zigzag: many at once, by formula."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.visibility.band import FAR, Ints, least_tiles
from megatron_burst.plans.visibility.cells import Cells
from megatron_burst.plans.visibility.fewest import fewest
from megatron_burst.plans.visibility.kinds import Kinds
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask

_NONE, _PART, _WHOLE = range(3)  # of a chunk, how much is no padding
_RANKS = 2048  # of more the codes of four chunks do not fit into 64 bits


class Documents(NamedTuple):
    """Documents that are each in zigzag by themselves; of each:"""

    chunk: Ints  # tokens of its 2P chunks
    first: Ints  # the first local row
    tokens: Ints  # before its padding


def documents_apart(layout: Layout, mask: Mask) -> Documents | None:
    """Return the documents of a layout that has each in zigzag, if the mask has the same.

    They may end in padding, and a window may hide keys; else None.
    """
    lengths = layout.documents
    if lengths is None or mask.documents is None or layout.ranks > _RANKS:
        return None
    if (mask.block_table, mask.query_stop) != (None, None):
        return None
    stops, bounds = np.cumsum(lengths), np.array(mask.documents)
    starts, is_padding = stops - lengths, np.zeros(len(bounds), bool)
    is_padding[list(mask.padding)] = True
    last = np.searchsorted(bounds, stops) - 1  # what each ends with
    begins = np.searchsorted(bounds, starts)
    count = last + 1 - begins
    are_same = (bounds[begins] == starts).all() and (bounds[last + 1] == stops).all()
    if not are_same or (count - is_padding[last] > 1).any() or is_padding[begins][count > 1].any():
        return None
    tokens = np.where(is_padding[last], bounds[last] - starts, lengths)
    chunk = np.array(lengths) // (2 * layout.ranks)
    return Documents(chunk, 2 * (np.cumsum(chunk) - chunk), tokens)


def of_documents(documents: Documents, ranks: int, mask: Mask) -> Iterator[Kinds]:
    """Return what is seen of all documents, of those together whose chunks see alike."""
    chunk, window = documents.chunk, FAR if mask.window is None else mask.window
    whole, rest = np.divmod(documents.tokens, chunk)
    most = 2 * ranks  # chunks
    sees_all = np.minimum((window + 1) // chunk - 1, most)  # of a chunk up to so many before it
    sees_any = np.minimum((window - 1) // chunk + 1, most)
    alike = np.stack([whole, rest > 0, sees_all, sees_any])
    keys, numbers = np.unique(alike, axis=1, return_inverse=True)
    order = np.argsort(numbers.ravel(), kind="stable")
    borders = np.cumsum(np.bincount(numbers.ravel()))[:-1]
    for key, members in zip(keys.T.tolist(), np.split(order, borders), strict=True):
        yield _of_alike(Documents(*(x[members] for x in documents)), ranks, mask, *key)


def _of_alike(
    documents: Documents,
    ranks: int,
    mask: Mask,
    whole: int,
    has_rest: int,
    sees_all: int,
    sees_any: int,
) -> Kinds:
    """Return what is seen of documents whose chunks see alike; see `of_documents`."""
    number = np.arange(2 * ranks)  # of the chunks
    state = np.where(number < whole, _WHOLE, np.where((number == whole) & has_rest, _PART, _NONE))
    distance = number[:, None] - number
    sees = (state[:, None] > _NONE) & (state > _NONE) & (distance <= sees_any)
    sees &= (distance >= 0) | (not mask.is_causal)
    # Of chunks that are seen whole one distance stands for all.
    distance = np.where((distance > 0) & (distance <= sees_all), 1, np.maximum(distance, -1))
    code = np.where(sees, 9 * (distance + 2) + 3 * state[:, None] + state, 0)
    held = np.stack([number[:ranks], number[: ranks - 1 : -1]])  # [2, rank]
    codes = [code[np.ix_(query, key)] for query in held for key in held]
    base = int(code.max()) + 1
    of_all = ((codes[0] * base + codes[1]) * base + codes[2]) * base + codes[3]
    _, examples, kinds = np.unique(of_all, return_index=True, return_inverse=True)
    digits = np.stack([each.ravel()[examples] for each in codes], axis=1).reshape(-1, 2, 2)
    of, query, key = digits.nonzero()
    digit = digits[of, query, key]
    cells, document = _cells(documents, mask, query, key, digit)
    count = len(documents.chunk)
    of_each = np.repeat(of, count) * count + document
    cells, of_each = fewest(of_each, np.repeat(query, count), cells)
    cells.sides[(cells.sizes == 1).all(axis=1)] = FAR  # what no larger square was made of
    return Kinds.of(kinds.reshape(ranks, ranks), cells, of_each // count)


def _cells(
    documents: Documents, mask: Mask, query: Ints, key: Ints, digit: Ints
) -> tuple[Cells, Ints]:
    """Return the cells of chunks, [chunks, document], and each one's document."""
    chunk, first, tokens = documents
    rest = tokens % chunk
    distance = ((digit // 9 - 2)[:, None] * chunk).ravel()
    begins = [(first + side[:, None] * chunk).ravel() for side in (query, key)]
    states = digit // 3 % 3, digit % 3
    sizes = [np.where((state == _PART)[:, None], rest, chunk).ravel() for state in states]
    shift = begins[1] - begins[0]
    right = distance + shift if mask.is_causal else np.full_like(shift, FAR)
    left = np.full_like(shift, FAR) if mask.window is None else mask.window - distance - shift
    rows = [begins[0], begins[0] + sizes[0], begins[1], begins[1] + sizes[1]]
    is_seen, tiles, sides = least_tiles(np.stack(rows, 1), np.stack([left, right], 1))
    assert is_seen.all(), "chunks that do not see each other"
    if mask.is_causal:  # a square of one row is one, too, where a larger one is made of it
        is_square = (distance == 0) & (tiles[:, 1] - tiles[:, 0] == 1)
        is_square &= (mask.window is None) | (np.tile(chunk, len(digit)) == 1)
        sides[is_square, 1] = 0
    return Cells(tiles, sides), np.tile(np.arange(len(chunk)), len(digit))
