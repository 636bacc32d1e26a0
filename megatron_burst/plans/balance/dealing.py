"""Deals documents, so that all ranks have as many tokens and compute as many pairs.

Under causality the queries of a document of n see (n + 1) / 2 keys on the mean: a token of a long
document is more work than one of a short. Nodes get their documents first, then the ranks of each,
so that few documents are on two nodes. Of those that are, all ranks of a node get as much, so that
none sends more to other nodes than the others do. How many tokens of which document a rank gets is
said here, which these are in `places`.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.balance.document_work import DocumentItems, DocumentWork
from megatron_burst.plans.balance.one_by_one import deal_one_by_one
from megatron_burst.plans.balance.places import Shares
from megatron_burst.plans.balance.whole_documents import deal_whole
from megatron_burst.plans.schedules.topology import by_node
from megatron_burst.plans.visibility.band import Bools, Ints
from megatron_burst.plans.visibility.layout import Layout

_SLACK = 64  # of twice a rank's work the share by which queries may have more than keys
_FEW = 32  # documents shorter than this share of a rank's tokens stay with their neighbours


class Way(NamedTuple):
    """How documents are dealt."""

    slack: int
    """By which share of its work, 1/slack, a rank may miss the mean to leave documents whole; 0 is
    to cut as many as it takes to be exact."""
    cuts: int
    """How often, for each rank, a document may be cut where they are dealt all at a time."""
    is_even: bool = True
    """Whether ranks that share a document then get as much of it."""


WAYS = (
    (Way(40, 4, is_even=False), Way(26, 0), Way(0, 0, is_even=False)),
    (Way(22, 4), Way(22, 0, is_even=False)),
)
"""Ways to try, none of which is the best for all documents; and more, where those do not do."""
QUICK_WAYS = (Way(40, 4),), (Way(0, 0, is_even=False),)
"""The same for many documents."""


def deal(work: DocumentWork, nodes: Sequence[Hashable], way: Way) -> Layout:
    """Return a layout for the ranks on these nodes; they divide the tokens."""
    local, node_ranks = int(work.lengths.sum()) // len(nodes), by_node(nodes)
    items = DocumentItems.of(work, local // _FEW)
    order = np.argsort(-items.rate, kind="stable")
    every = np.stack([order, items.length[order], items.rate[order], 0 * order])
    dealt = [*_to_nodes(every, node_ranks, local, way)]
    number = {rank: number for number, row in enumerate(node_ranks) for rank in row}
    node = [number[rank] for rank in range(len(nodes))]
    slack = int(every[1] @ every[2]) // len(nodes) // _SLACK if way.slack else 0
    return Shares(items, _summed(dealt, len(nodes)), node, slack).layout()


def _to_nodes(
    items: Ints, node_ranks: Sequence[Sequence[int]], local: int, way: Way
) -> Iterator[tuple[int, Ints]]:
    """Give each rank what it holds: deal to nodes, and what a node has to its ranks."""
    room = [local * len(ranks) for ranks in node_ranks]
    held = _dealt(items, room, 16 * way.slack, way, is_even=True)
    nodes = np.bincount(np.concatenate(held, axis=1)[0])  # of each item, how many have some of it
    for ranks, theirs in zip(node_ranks, held, strict=True):
        is_far = (nodes[theirs[0]] > 1) & (theirs[1] >= local // _FEW)
        each, left = _evenly(theirs, is_far, len(ranks))
        room = [local - int(each[1].sum())] * len(ranks)
        own = _dealt(left, room, way.slack, way, is_even=way.is_even)
        for rank, more in zip(ranks, own, strict=True):
            yield rank, np.concatenate([each, more], axis=1)


def _evenly(held: Ints, is_shared: Bools, ranks: int) -> tuple[Ints, Ints]:
    """Return what each rank of a node gets of some items, and what is left to deal to them."""
    each, left = held.copy(), held.copy()
    each[1] = np.where(is_shared, held[1] // ranks, 0)
    left[1] -= ranks * each[1]
    left[3] = 0
    order = np.lexsort((left[0], -left[2]))
    return each[:, each[1] > 0], left[:, order[left[1, order] > 0]]


def _dealt(
    items: Ints, room: Sequence[int], slack: int, way: Way, *, is_even: bool
) -> Sequence[Ints]:
    """Deal to nodes or ranks: whole documents if that goes, else to one after the other."""
    if len(room) == 1 or not items.size:
        return [items] * len(room)
    if way.cuts and (held := deal_whole(items, room, way.slack, way.cuts, is_even=way.is_even)):
        return held
    return [*deal_one_by_one(items, room, slack, is_even=is_even and slack > 0)]


def _summed(dealt: Sequence[tuple[int, Ints]], ranks: int) -> Ints:
    """Return how many tokens of each item each rank got: [item, tokens and rank, share]."""
    owner = np.repeat([rank for rank, _ in dealt], [held.shape[1] for _, held in dealt])
    item, tokens, *_ = np.concatenate([held for _, held in dealt], axis=1)
    place, at = np.unique(item * ranks + owner, return_inverse=True)
    summed = np.bincount(at, tokens).astype(np.int64)
    return np.stack([place // ranks, summed, place % ranks])
