"""Which tokens each rank gets, so that all compute as many pairs of a batch's documents.

Under causality the queries of a document of n see (n + 1) / 2 keys on the mean: a token of a long
document is more work than one of a short. First it is said how many tokens of which document a rank
gets: of those left one of the longest, then others of about the length that brings its work to the
mean. A document of more work than that is shared: each rank takes as much of it as leaves work for
its other tokens, which are of shorter ones. What is left has always the mean, so that there is such
a mixture for every rank. Nodes get their documents first, then the ranks of each, so that few
documents are on two nodes.

Then the positions are chosen. Of a shared document a rank takes as many tokens from the front as
from the back, so that its queries, and its keys, have the mean of the pairs. Whoever is farther
inside sends more rows; that is to be a rank with few tokens of it, and that sends few of others.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.document_work import DocumentWork
from megatron_burst.plans.layout import Layout
from megatron_burst.plans.topology import by_node
from megatron_burst.plans.whole_documents import deal_whole

_SLACK = 64  # the share of a rank's work by which it may miss the mean to leave documents whole
_FEW = 32  # documents shorter than this share of a rank's tokens stay with their neighbours
_FAR = 64  # how much worse it is to send to another node
_PARTS = 8  # among how many is dealt at once
_SHORT, _LONG = 1, 2  # what is begun, and goes on with the next rank: a short item or a long one

type _Ints = NDArray[np.int64]


class Way(NamedTuple):
    """How documents are dealt."""

    slack: int
    """By which share of its work, 1/slack, a rank may miss the mean to leave documents whole; 0 is
    to cut as many as it takes to be exact."""
    cuts: int
    """How often, for each rank, a document may be cut where they are dealt all at a time."""
    is_even: bool = True
    """Whether ranks that share a document then get as much of it."""


WAYS = Way(40, 4), Way(32, 0), Way(0, 0)
"""None is the best for all documents; some of the first may be too uneven."""
MORE_WAYS = Way(21, 4), Way(64, 4), Way(32, 1, is_even=False), Way(40, 2), Way(32, 4)
"""To be tried where each of the first puts more bytes on the bottleneck link than zigzag."""


def deal(work: DocumentWork, nodes: Sequence[Hashable], way: Way) -> Layout:
    """Return a layout for the ranks on these nodes; they divide the tokens."""
    return _Deal.of(work, nodes, way).layout()


class _Items(NamedTuple):
    """What is dealt: documents, and short ones that follow each other as one; arrays."""

    start: _Ints
    length: _Ints
    rate: _Ints  # twice the pairs of a token, the mean
    reach: _Ints  # how far queries see; 0 where all see as much, wherever they are

    @classmethod
    def of(cls, work: DocumentWork, short: int) -> "_Items":
        """Neighbours shorter than `short` are one if they begin in the same `short` tokens."""
        is_short, place = work.lengths < short, work.starts // max(short, 1)
        again = is_short[1:] & is_short[:-1] & (place[1:] == place[:-1])
        first = (np.concatenate([[True], ~again])).nonzero()[0]
        length = np.add.reduceat(work.lengths, first)
        rate = 2 * np.add.reduceat(work.pairs, first) // length
        reach = np.minimum(np.maximum.reduceat(work.lengths, first), work.window)
        return cls(work.starts[first], length, rate, reach if work.is_causal else 0 * reach)


class _Stock:
    """What is left of the items, in arrays, the highest rates first."""

    def __init__(self, left: _Ints) -> None:
        self.left = left
        self.item, self.length, self.rate, _ = left
        sums = np.zeros((2, len(self.item) + 1), np.int64)
        sums[0, 1:] = self.length
        np.multiply(self.length, self.rate, out=sums[1, 1:])
        self.ends, self.sums = sums.cumsum(axis=1)  # tokens and work before each, and of all
        self.tokens, self.work = self.ends[-1].item(), self.sums[-1].item()

    def without(self, first: int, stop: int) -> "_Stock":
        return _Stock(np.concatenate([self.left[:, :first], self.left[:, stop:]], axis=1))

    def having(self, rest: _Ints) -> "_Stock":
        at = int((-self.rate).searchsorted(-rest[2, 0]))
        return _Stock(np.concatenate([self.left[:, :at], rest, self.left[:, at:]], axis=1))

    def of_first(self, tokens: _Ints) -> _Ints:
        """Return the work of so many first tokens."""
        at = np.minimum(self.ends.searchsorted(tokens, "right"), len(self.item)) - 1
        return self.sums[at] + (tokens - self.ends[at]) * self.rate[at]

    def of_last(self, tokens: int) -> int:
        """Return the work of so many last tokens: no others have less."""
        if tokens == 0:
            return 0
        border = self.tokens - tokens
        at = int(self.ends.searchsorted(border, "right")) - 1
        before = self.sums[at] + (border - self.ends[at]) * self.rate[at]
        return self.work - int(before)

    def room(self, tokens: int, work: int, rate: int) -> int:
        """Return for how many tokens of this rate there is work, if the last ones go with them."""
        beside = self.ends + tokens - self.tokens  # so many, if the others begin with an item
        more = work - beside * rate - (self.work - self.sums)
        at = min(max(1, int((-more).searchsorted(0, "right"))), len(self.item)) - 1
        return int(beside[at]) + int(more[at]) // max(1, rate - int(self.rate[at]))

    def run(self, tokens: int, work: int, slack: int) -> tuple[int, int] | None:
        """Return the first and the last but one of items that fit so many tokens and this work.

        With the last tokens of the stock for the rest. Of several the one that cuts least off the
        item that is the last then; None if there is none.
        """
        first = np.arange(int(self.ends.searchsorted(self.tokens - tokens, "right")))
        if not len(self.item) or not len(first):
            return None
        stop = self.ends.searchsorted(self.ends[first] + tokens, "right") - 1
        border = self.tokens - tokens + self.ends[stop] - self.ends[first]
        found = self.sums[stop] - self.sums[first] + self.work - self.of_first(border)
        far = np.abs(found - work)
        some = (far <= slack).nonzero()[0]
        if not len(some):
            return None
        border, last = border[some], self.ends.searchsorted(border[some])
        loss = np.minimum(self.ends[last] - border, border - self.ends[last - 1])
        best = some[np.lexsort((far[some], loss))[0]]
        return int(first[best]), int(stop[best])

    def dense(self, tokens: int, work: int) -> int:
        """Return the longest item that fits so many tokens and this work, if it is long enough.

        Those from it on are to have this work in so many tokens. If none is, the shortest that is
        long enough.
        """
        count = int(self.ends.searchsorted(self.tokens - tokens, "right"))
        far = self.of_first(self.ends[:count] + tokens) - self.sums[:count] - work
        enough = max(1, int(np.searchsorted(-far, 0, "right")))
        least = self.of_last(tokens) // tokens
        fits = self.length * (self.rate - least) <= work - least * tokens
        fits[enough - 1] = True
        return int(fits.argmax())


class _Hand:
    """What some ranks get of the stock."""

    def __init__(self, stock: _Stock, tokens: int, work: int, slack: int, *, is_even: bool) -> None:
        self.stock, self.slack, self.is_even = stock, slack, is_even
        self.tokens, self.work = tokens, work  # what they still are to have
        self.most_begun = tokens // 2
        self.parts: list[_Ints] = []  # of items, like what is left of them
        self.rests: list[_Ints] = []  # of what is shared with the next ones

    def fill(self) -> _Ints:
        """Take what was begun, a long document, then what brings the work to the mean."""
        begun = self.stock.left[3]
        has_long = bool((begun == _LONG).any())
        for number in begun.nonzero()[0][::-1].tolist():
            if self.tokens and self._leaves_work(number):
                self._take(number, is_shared=True)
        if self.tokens and not has_long:
            self._take(0, is_shared=True)
        while self.tokens:
            if self.slack and (run := self.stock.run(self.tokens, self.work, self.slack)):
                self._fill_up(*run)
            else:
                dense = self.stock.dense(self.tokens, self.work) if self.slack else 0
                self._take(dense, is_shared=False)
        for rest in self.rests:
            self.stock = self.stock.having(rest)
        return np.concatenate(self.parts, axis=1)

    def _leaves_work(self, number: int) -> bool:
        """Whether the longest documents beside an item bring the work to the mean."""
        length, rate = self.stock.left[1:3, number].tolist()
        beside = max(0, self.tokens - length)
        most = int(self.stock.of_first(np.array(beside))) + (self.tokens - beside) * rate
        return most >= self.work - self.slack

    def _take(self, number: int, *, is_shared: bool) -> None:
        """Take an item, or what there is work for; is it shared, as much as the next will have."""
        item, length, rate, _ = self.stock.left[:, number].tolist()
        self.stock = self.stock.without(number, number + 1)
        tokens, least = self._most(length, rate), max(0, self.tokens - self.stock.tokens)
        if is_shared and self.is_even and tokens:
            tokens = max(least, -(-length // -(-length // tokens)))
        self.parts.append(np.array([[item], [tokens], [rate], [0]]))
        self.tokens -= tokens
        self.work -= tokens * rate
        if rest := length - tokens:
            begun = _LONG if is_shared and tokens else 0
            self.rests.append(np.array([[item], [rest], [rate], [begun]]))
            if not (is_shared and self.is_even):
                self._fill_up(0, 0)

    def _most(self, length: int, rate: int) -> int:
        """How many tokens of an item there is work for, with the shortest ones for the others."""
        least, most = max(0, self.tokens - self.stock.tokens), min(length, self.tokens)
        goal = self.work + self.slack
        if most <= least or most * rate + self.stock.of_last(self.tokens - most) <= goal:
            return most
        return min(most, max(least, self.stock.room(self.tokens, goal, rate)))

    def _fill_up(self, first: int, stop: int) -> None:
        """Take all of some items, and for the rest the last ones."""
        left, ends = self.stock.left, self.stock.ends
        border = int(ends[-1] - self.tokens + ends[stop] - ends[first])
        last = int(ends.searchsorted(border))
        self.parts += left[:, first:stop], left[:, last:]
        kept = np.concatenate([left[:, :first], left[:, stop:last]], axis=1)
        if tokens := int(ends[last]) - border:
            part, rest = kept[:, -1:].copy(), kept[1, -1] - tokens
            part[1], kept[1, -1] = tokens, rest
            kept[3, -1] = _SHORT if rest <= self.most_begun else 0
            self.parts.append(part)
        self.stock, self.tokens = _Stock(kept), 0


def _dealt(
    stock: _Stock, rows: Sequence[tuple[int, ...]], local: int, way: Way
) -> Iterator[tuple[int, _Ints]]:
    """Give each rank what it holds: deal to nodes, and what a node has to its ranks."""
    if len(rows) == 1:
        rows = [(rank,) for rank in rows[0]]
    held = None
    if way.cuts:
        room = [len(row) * local for row in rows]
        held = deal_whole(stock.left, room, way.slack, way.cuts, is_even=way.is_even)
    if held is None:
        held = [*_one_by_one(stock, [*map(len, rows)], local, way)]
    for row, some in zip(rows, held, strict=True):
        if len(row) == 1:
            yield row[0], some
        else:
            yield from _dealt(_again(some), [row], local, way)


def _one_by_one(stock: _Stock, counts: Sequence[int], local: int, way: Way) -> Iterator[_Ints]:
    """Give so many ranks each what they hold: deal to a few groups of them, one after another."""
    left = sum(counts)
    for group in batched(counts, -(-len(counts) // _PARTS)):
        ranks, held = sum(group), stock.left
        if ranks < left:
            work = stock.work * ranks // left
            slack = work // (way.slack if ranks == 1 else 16 * way.slack) if way.slack else 0
            is_even = ranks > 1 and way.slack > 0
            hand = _Hand(stock, ranks * local, work, slack, is_even=is_even)
            held, stock, left = hand.fill(), hand.stock, left - ranks
        if len(group) == 1:
            yield held
        else:
            yield from _one_by_one(_again(held), group, local, way)


def _again(held: _Ints) -> _Stock:
    """Return what was dealt as a stock to deal."""
    stock = held[:, np.lexsort((held[0], -held[2]))]
    stock[3] = 0
    return _Stock(stock)


@dataclass(frozen=True, slots=True)
class _Deal:
    """How many tokens of each item the ranks get."""

    items: _Items
    shares: _Ints  # [item, tokens and rank, share]
    nodes: Sequence[int]  # of each rank
    slack: int  # how much more queries than keys may have, that ends need not be shared evenly

    @classmethod
    def of(cls, work: DocumentWork, nodes: Sequence[Hashable], way: Way) -> "_Deal":
        """Deal to nodes, and what a node has to its ranks."""
        local, rows = int(work.lengths.sum()) // len(nodes), by_node(nodes)
        items = _Items.of(work, local // _FEW)
        order = np.argsort(-items.rate, kind="stable")
        stock = _Stock(np.stack([order, items.length[order], items.rate[order], 0 * order]))
        shares = [
            np.stack([*held[:2], np.full(held.shape[1], rank)])
            for rank, held in _dealt(stock, rows, local, way)
        ]
        number = {rank: number for number, row in enumerate(rows) for rank in row}
        node = [number[rank] for rank in range(len(nodes))]
        slack = stock.work // len(nodes) // _SLACK if way.slack else 0
        return cls(items, np.concatenate(shares, axis=1), node, slack)

    def layout(self) -> Layout:
        """Choose the positions, those of long documents first."""
        shares = self.shares[:, self.shares[1] > 0]
        is_shared = np.bincount(shares[0])[shares[0]] > 1
        item, tokens, rank = shares[:, ~is_shared]
        alone = np.stack([rank, self.items.start[item], self.items.start[item] + tokens])
        shared = shares[:, is_shared]
        shared = shared[:, np.lexsort((shared[0], -self.items.rate[shared[0]]))]
        places, sent = list[tuple[int, int, int]](), [0] * len(self.nodes)
        for number, some in groupby(shared.T.tolist(), key=itemgetter(0)):
            places += self._places(number, {rank: tokens for _, tokens, rank in some}, sent)
        every = np.concatenate([alone, np.array(places, np.int64).reshape(-1, 3).T], axis=1)
        every = every[:, every[1] < every[2]]
        return _laid_out(every[:, self._order(every)], len(self.nodes))

    def _order(self, places: _Ints) -> _Ints:
        """In which order the rows of a rank are: first of documents that are on other nodes too.

        A ring sends a node all rows from the first to the last that it needs. So documents on the
        same nodes lie side by side, and behind them those on one node more or less: in a Gray code.
        """
        owner, start, _ = places
        item, node = self.items.start.searchsorted(start, "right") - 1, np.array(self.nodes)[owner]
        is_on = np.zeros((len(self.items.start), max(self.nodes) + 1), bool)
        is_on[item, node] = True
        others = (node[:, None] + np.arange(1, is_on.shape[1] + 1)) % is_on.shape[1]
        numbers = np.packbits(
            np.logical_xor.accumulate(is_on[item[:, None], others], axis=1), axis=1
        )
        return np.lexsort((start, *~numbers.T[::-1], owner))

    def _places(
        self, item: int, tokens: Mapping[int, int], sent: list[int]
    ) -> Iterator[tuple[int, int, int]]:
        """Who of some ranks gets which positions of an item, each so many tokens.

        One after the other from the ends to the middle, or from the front to the back. `sent` is
        what each rank sends, twice the rows, one that goes to another node `_FAR` times.
        """
        front = start = int(self.items.start[item])
        back = stop = start + int(self.items.length[item])
        order, reach = [*tokens], int(self.items.reach[item])
        is_plain = reach == 0
        if reach and len(order) == 2:
            first, last = order = sorted(order, key=lambda rank: tokens[rank])
            is_plain = tokens[first] * min(tokens[last], reach) <= self.slack
        if is_plain and reach:
            is_near = self.nodes[first] == self.nodes[last]
            sent[first] += 2 * tokens[first] * (1 if is_near else _FAR)
        elif reach:
            order = self._inwards(tokens, sent)
        for rank in order:
            taken = front - start + tokens[rank] + stop - back
            after = start + (taken if is_plain else taken // 2)
            yield rank, front, after
            if not is_plain:
                yield rank, stop - (taken - taken // 2), back
                back = stop - (taken - taken // 2)
            front = after

    def _inwards(self, tokens: Mapping[int, int], sent: list[int]) -> list[int]:
        """In which order ranks take from the ends to the middle, so that none sends too much.

        The one inside is seen by most, and is to have the fewest tokens; of several the one that
        sends the least of other documents.
        """
        outer, inside = [*tokens], list[int]()
        every = Counter(self.nodes[rank] for rank in outer)
        near = every.copy()

        while outer:
            inner = min(outer, key=lambda rank: (tokens[rank], sent[rank]))
            node = self.nodes[inner]
            users = len(tokens) + len(outer) - every[node] - near[node]
            sent[inner] += tokens[inner] * (_FAR * users + every[node] + near[node] - 2)
            outer.remove(inner)
            near[node] -= 1
            inside.append(inner)
        return inside[::-1]


def _laid_out(places: _Ints, ranks: int) -> Layout:
    """Return the layout of these ranks and ranges, in order, neighbours joined."""
    owner, start, stop = places
    first = np.r_[True, (owner[1:] != owner[:-1]) | (start[1:] != stop[:-1])].nonzero()[0]
    last = np.r_[first[1:], len(owner)] - 1
    shards: list[list[range]] = [[] for _ in range(ranks)]
    for rank, *ends in zip(
        owner[first].tolist(), start[first].tolist(), stop[last].tolist(), strict=True
    ):
        shards[rank].append(range(*ends))
    return Layout(tuple(map(tuple, shards)))
