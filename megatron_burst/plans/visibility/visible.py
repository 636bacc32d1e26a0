"""Finds what all ranks see of each other."""

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.visibility.band import FAR, Bools, Ints, least_tiles
from megatron_burst.plans.visibility.cells import Cells
from megatron_burst.plans.visibility.documents import documents_apart, of_documents
from megatron_burst.plans.visibility.fewest import fewest
from megatron_burst.plans.visibility.kinds import Kinds, Visible
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import FULLY, NOT, PARTLY, Mask
from megatron_burst.plans.visibility.pieces import Pieces, cut_pieces

_QUERIES = 512  # how many pieces are looked at at once
_ALL = 2**24  # pairs of pieces, a byte each, that are looked at at once where ranks may be alike


def visible(layout: Layout, mask: Mask) -> Visible:
    """Return what the ranks' queries see of each other's keys."""
    if (documents := documents_apart(layout, mask)) is not None:
        return Visible([*of_documents(documents, layout.ranks, mask)])
    ranks, pieces = layout.ranks, cut_pieces(layout, mask.cuts(layout.tokens))
    compared = _kinds(pieces, mask, ranks, layout.tokens)
    if compared is None:
        pairs = _all_pairs(pieces, mask, layout.tokens)
        of = pieces.owner[pairs.queries] * ranks + pieces.owner[pairs.keys]
        compared = np.arange(ranks**2).reshape(ranks, ranks), of, pairs
    of_pairs, of, pairs = compared
    is_seen, cells = _cells(pieces, mask, pairs)
    return Visible([Kinds.of(of_pairs, *fewest(of[is_seen], pairs.queries[is_seen], cells))])


class _Pairs(NamedTuple):
    """Pieces of queries that see pieces of keys."""

    queries: NDArray[np.intp]  # their numbers
    keys: NDArray[np.intp]
    are_full: Bools  # whether every query sees every key


def _all_pairs(pieces: Pieces, mask: Mask, tokens: int) -> _Pairs:
    """Return all pieces that see each other."""
    order, pairs = np.argsort(pieces.starts), list[_Pairs]()
    every = pieces[order]
    for begin in range(0, len(order), _QUERIES):
        queries = every[begin : begin + _QUERIES]
        low, high = mask.reach(int(queries.starts[0]), int(queries.lasts.max()))
        near = np.flatnonzero((every.lasts >= low) & (every.starts <= high))
        table = mask.overview(queries.bounds, every[near].bounds, tokens)
        q, k = table.nonzero()
        pairs.append(_Pairs(order[begin + q], order[near[k]], table[q, k] == FULLY))
    return _Pairs(*map(np.concatenate, zip(*pairs, strict=True)))


def _kinds(
    pieces: Pieces, mask: Mask, ranks: int, tokens: int
) -> tuple[NDArray[np.intp], Ints, _Pairs] | None:
    """Compare what ranks see of each other by pieces, and from how far where they see a part.

    Return the kinds, [query owner, key owner], then of which kind each pair of pieces is, one
    example of all. None where the ranks' rows are not cut alike, as by documents, or into too many
    pieces.
    """
    count = len(pieces.owner) // ranks  # of a rank
    if len(pieces.owner) ** 2 > _ALL or len(pieces.owner) != ranks * count:
        return None
    if any((x.reshape(ranks, count) != x[:count]).any() for x in (pieces.first, pieces.stop)):
        return None
    table = mask.overview(pieces.bounds, pieces.bounds, tokens)
    query, key = (table == PARTLY).nonzero()
    distances, number = np.unique(pieces.starts[query] - pieces.starts[key], return_inverse=True)
    base = 3 + len(distances)
    if base**count**2 >= 2**64:
        return None
    digits = table.astype(np.min_scalar_type(base**count**2))
    digits[query, key] = 3 + number
    codes = np.zeros((ranks, ranks), digits.dtype)  # all digits of two ranks as one number
    for i, j in product(range(count), repeat=2):
        codes = codes * base + digits[i::count, j::count]
    _, examples, kinds = np.unique(codes, return_index=True, return_inverse=True)
    of, *places = np.indices((len(examples), count, count)).reshape(3, -1)
    query, key = np.array(np.divmod(examples, ranks))[:, of] * count + places
    seen = table[query, key]
    is_seen = seen != NOT
    return (
        kinds.reshape(ranks, ranks),
        of[is_seen],
        _Pairs(query[is_seen], key[is_seen], seen[is_seen] == FULLY),
    )


def _cells(pieces: Pieces, mask: Mask, pairs: _Pairs) -> tuple[Bools, Cells]:
    """Return what causality and a window leave of pieces, before it whether anything is left."""
    queries, keys, step = pieces[pairs.queries], pieces[pairs.keys], pieces.step
    distance, shift = queries.starts - keys.starts, keys.first - queries.first
    right = np.where(pairs.are_full | (not mask.is_causal), FAR, distance // step + shift)
    left = ((mask.window or 0) - distance) // step - shift
    left = np.where(pairs.are_full | (mask.window is None), FAR, left)
    rows = np.stack([queries.first, queries.stop, keys.first, keys.stop], axis=1)
    is_seen, rows, sides = least_tiles(rows, np.stack([left, right], axis=1))
    return is_seen, Cells(rows[is_seen], sides[is_seen])
