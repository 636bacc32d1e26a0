"""A layout made for the documents of a batch: every rank has as many tokens, and as much work.

Under causality a token of a document of n computes (n + 1) / 2 pairs on the mean, so a token of a
long document costs more than one of a short. First it is said how many tokens of which document
each rank gets. It takes one of the longest that are left, whole, then others of about the length
that brings its work to the mean. A document with more work than that goes to several ranks, one
after the other: each takes as much of it as leaves work for the rest of its tokens, which are of
the shortest documents left.

Then the positions are chosen. Of a document that ranks share each takes as many tokens from the
front as from the back, so that its queries have the mean of the pairs, and its keys, too. Whoever
takes what is farther inside sends more; that is to be one who sends little of other documents.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.layout import Interval, Layout, joined, zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.topology import by_node

BOUND = 1.05
"""How much more than the mean a rank may compute."""

_SLACK = 64  # the share of a rank's work by which it may miss the mean to leave documents whole
_FEW = 32  # documents shorter than this share of a rank's tokens stay with their neighbours
_FAR = 64  # how much worse it is to send to another node
_PARTS = 8  # among how many is dealt at once
_SHORT, _LONG = 1, 2  # what is begun, and goes on with the next rank: a short item or a long one

type _Ints = NDArray[np.int64]


class Balanced(NamedTuple):
    """A layout for the documents of a batch."""

    layout: Layout
    chunk: int
    """How many tokens follow each other on a rank, the mean."""
    imbalance: float
    """Max / mean over the ranks of their pairs, by queries or by keys; 1.0 is perfect."""


def balanced(mask: Mask, tokens: int, nodes: Sequence[Hashable]) -> Balanced:
    """Return a layout with equal tokens and nearly equal work for the ranks on these nodes.

    Zigzag, where that is within `BOUND` or no worse. The same on every rank: integers decide.

    Raises:
        ValueError: the tokens do not divide as zigzag needs it, or the mask has a block table.
    """
    layout = zigzag(tokens, len(nodes))
    uneven = imbalance(layout, mask)
    if uneven > BOUND:
        dealt = _Deal.of(_Work.of(mask, tokens), layout.local_tokens, nodes).layout()
        uneven, layout = min((imbalance(dealt, mask), dealt), (uneven, layout), key=itemgetter(0))
    return Balanced(layout, tokens // sum(map(len, layout.shards)), uneven)


def pays(mask: Mask, tokens: int, ranks: int) -> bool:
    """Whether there are documents, and zigzag leaves a rank with more than `BOUND` of the mean."""
    return mask.documents is not None and imbalance(zigzag(tokens, ranks), mask) > BOUND


def imbalance(layout: Layout, mask: Mask) -> float:
    """Return max / mean of the ranks' pairs, of their queries' or their keys', the larger.

    `Tiling.needs.pairs` has the same sums, of rows and of columns; this needs no tiles. The layout
    is of ranges without gaps, the mask without a block table.
    """
    work = _Work.of(mask, layout.tokens)
    ends = np.array([(r.start, r.stop) for shard in layout.shards for r in shard]).T
    begins = np.cumsum([0, *map(len, layout.shards[:-1])])
    sums = [np.add.reduceat(before[1] - before[0], begins) for before in work.before(ends)]
    return float(max(of_ranks.max() for of_ranks in sums) * layout.ranks / work.pairs.sum())


@dataclass(frozen=True, slots=True)
class _Work:
    """How many pairs the queries, or the keys, of positions have."""

    starts: _Ints  # of documents
    lengths: _Ints
    window: int
    is_causal: bool

    @classmethod
    def of(cls, mask: Mask, tokens: int) -> "_Work":
        mask.check_length(tokens)
        if mask.block_table is not None:
            raise ValueError("a layout is balanced for documents, not for a block mask")
        borders = np.array(mask.documents or (0, tokens))
        window = tokens if mask.window is None else mask.window
        return cls(borders[:-1], np.diff(borders), window, mask.is_causal)

    @property
    def pairs(self) -> _Ints:
        """Those of each document."""
        return self._of_first(self.lengths, self.lengths)

    def before(self, positions: _Ints) -> tuple[_Ints, _Ints]:
        """Return the pairs of all queries before each position, and those of all keys."""
        document = np.searchsorted(self.starts, positions, "right") - 1
        length, first = self.lengths[document], positions - self.starts[document]
        every = self.pairs
        done, whole = (np.cumsum(every) - every)[document], every[document]
        behind = self._of_first(length - first, length)  # keys are queries read backwards
        return done + self._of_first(first, length), done + whole - behind

    def _of_first(self, count: _Ints, length: _Ints) -> _Ints:
        """The pairs of so many first queries of documents of these lengths."""
        growing = np.minimum(count, self.window + 1)  # as long as the window hides nothing
        behind = growing * (growing + 1) // 2 + (count - growing) * (self.window + 1)
        return behind if self.is_causal else behind + count * length - count * (count + 1) // 2


class _Items(NamedTuple):
    """What is dealt: documents, and short ones that follow each other as one; arrays."""

    start: _Ints
    length: _Ints
    rate: _Ints  # twice the pairs of a token, the mean
    reach: _Ints  # how far queries see; 0 where all see as much, wherever they are

    @classmethod
    def of(cls, work: _Work, short: int) -> "_Items":
        """Neighbours shorter than `short` are one if they begin in the same `short` tokens."""
        is_short, place = work.lengths < short, work.starts // max(short, 1)
        again = is_short[1:] & is_short[:-1] & (place[1:] == place[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~again]))
        length = np.add.reduceat(work.lengths, first)
        rate = 2 * np.add.reduceat(work.pairs, first) // length
        reach = np.minimum(np.maximum.reduceat(work.lengths, first), work.window)
        return cls(work.starts[first], length, rate, reach if work.is_causal else 0 * reach)


class _Stock:
    """What is left of the items, in arrays, the highest rates first."""

    def __init__(self, left: _Ints) -> None:
        self.left = left
        self.item, self.length, self.rate, self.begun = left
        self.ends = np.concatenate([[0], np.cumsum(self.length)])  # tokens before each, and all
        self.sums = np.concatenate([[0], np.cumsum(self.length * self.rate)])  # and their work
        self.tokens, self.work = int(self.ends[-1]), int(self.sums[-1])

    def without(self, first: int, stop: int) -> "_Stock":
        return _Stock(np.concatenate([self.left[:, :first], self.left[:, stop:]], axis=1))

    def having(self, item: int, length: int, rate: int, begun: int) -> "_Stock":
        at = int(np.searchsorted(-self.rate, -rate))
        return _Stock(np.insert(self.left, at, (item, length, rate, begun), axis=1))

    def of_first(self, tokens: _Ints) -> _Ints:
        """Return the work of so many first tokens."""
        at = np.minimum(np.searchsorted(self.ends, tokens, "right"), len(self.item)) - 1
        return self.sums[at] + (tokens - self.ends[at]) * self.rate[at]

    def of_last(self, tokens: int) -> int:
        """Return the work of so many last tokens: no others have less."""
        return self.work - int(self.of_first(np.array(self.tokens - tokens))) if tokens else 0

    def run(self, tokens: int, work: int, slack: int) -> tuple[int, int] | None:
        """Return the first and the last but one of items that fit so many tokens and this work.

        With the last tokens of the stock for the rest. Of several the one that cuts least off the
        item that is the last then; None if there is none.
        """
        first = np.arange(int(np.searchsorted(self.ends, self.tokens - tokens, "right")))
        stop = np.searchsorted(self.ends, self.ends[first] + tokens, "right") - 1
        border = self.tokens - tokens + self.ends[stop] - self.ends[first]
        found = self.sums[stop] - self.sums[first] + self.work - self.of_first(border)
        far = np.abs(found - work)
        some = np.flatnonzero(far <= slack)
        if not len(some):
            return None
        border, last = border[some], np.searchsorted(self.ends, border[some])
        loss = np.minimum(self.ends[last] - border, border - self.ends[last - 1])
        best = some[np.lexsort((far[some], loss))[0]]
        return int(first[best]), int(stop[best])

    def dense(self, tokens: int, work: int) -> int:
        """Return the longest item that fits so many tokens and this work, if it is long enough.

        Those from it on are to have this work in so many tokens. If none is, the shortest that is
        long enough.
        """
        count = int(np.searchsorted(self.ends, self.tokens - tokens, "right"))
        far = self.of_first(self.ends[:count] + tokens) - self.sums[:count] - work
        enough = max(1, int(np.searchsorted(-far, 0, "right")))
        least = self.of_last(tokens) // tokens
        fits = self.length * (self.rate - least) <= work - least * tokens
        fits[enough - 1] = True
        return int(fits.argmax())


class _Hand:
    """What some ranks get of the stock."""

    def __init__(self, stock: _Stock, tokens: int, work: int, slack: int) -> None:
        self.stock, self.slack = stock, slack
        self.tokens, self.work = tokens, work  # what they still are to have
        self.most_begun = tokens // 2
        self.shares: list[tuple[int, int, int, int]] = []  # of an item so many tokens

    def fill(self) -> None:
        """Take what was begun, a long document, then what brings the work to the mean."""
        begun = self.stock.begun
        has_long = bool((begun == _LONG).any())
        for number in np.flatnonzero(begun)[::-1].tolist():
            if self.tokens:
                self._take(number)
        if self.tokens and not has_long:
            self._take(0)
        while self.tokens:
            run = self.stock.run(self.tokens, self.work, self.slack)
            if run is None:
                self._take(self.stock.dense(self.tokens, self.work))
            else:
                self._take_all(*run)
                self._take_last()

    def _take(self, number: int) -> None:
        """Take an item, or as much of it as leaves work for the other tokens: short documents."""
        item, length, rate, _ = self.stock.left[:, number].tolist()
        self.stock = self.stock.without(number, number + 1)
        tokens = self._most(length, rate)
        self._hold(item, tokens, rate)
        if tokens < length:
            self._take_last()
            begun = _LONG if tokens else 0
            self.stock = self.stock.having(item, length - tokens, rate, begun)

    def _most(self, length: int, rate: int) -> int:
        """How many tokens of an item there is work for."""

        def work(tokens: int) -> int:
            return tokens * rate + self.stock.of_last(self.tokens - tokens)

        least, most = max(0, self.tokens - self.stock.tokens), min(length, self.tokens)
        goal = self.work + self.slack
        if work(most) <= goal:
            return most
        found = least + bisect_right(range(least, most), goal, key=work) - 1
        return self._snapped(max(least, found), rate, least, most)

    def _snapped(self, tokens: int, rate: int, least: int, most: int) -> int:
        """About as many tokens, so that the short documents beside them are whole."""
        border = self.stock.tokens - self.tokens + tokens
        at = int(np.searchsorted(self.stock.ends, border))
        for end in self.stock.ends[max(0, at - 1) : at + 1].tolist():
            more = end - border
            error = abs(more) * (rate - int(self.stock.rate[at - 1]))
            if at and least <= tokens + more <= most and error <= self.slack:
                return tokens + more
        return tokens

    def _take_last(self) -> None:
        """Fill up with the shortest documents."""
        if not self.tokens:
            return
        ends = self.stock.ends
        self._take_all(int(np.searchsorted(ends, ends[-1] - self.tokens)), len(ends) - 1)
        if tokens := self.tokens:
            number = len(self.stock.item) - 1
            item, length, rate, _ = self.stock.left[:, number].tolist()
            self.stock = self.stock.without(number, number + 1)
            self._hold(item, tokens, rate)
            begun = _SHORT if length - tokens <= self.most_begun else 0
            self.stock = self.stock.having(item, length - tokens, rate, begun)

    def _take_all(self, first: int, stop: int) -> None:
        """Take all of some items."""
        for item, length, rate, _ in self.stock.left[:, first:stop].T.tolist():
            self._hold(item, length, rate)
        self.stock = self.stock.without(first, stop)

    def _hold(self, item: int, tokens: int, rate: int) -> None:
        if tokens:
            self.shares.append((item, tokens, rate, 0))
        self.tokens -= tokens
        self.work -= tokens * rate


def _dealt(
    stock: _Stock, rows: Sequence[tuple[int, ...]], local: int
) -> Iterator[tuple[int, _Stock]]:
    """Give each rank what it holds: deal to a few groups of nodes, of those to nodes, to ranks."""
    if len(rows) == 1:
        if len(rows[0]) == 1:
            yield rows[0][0], stock
            return
        rows = [(rank,) for rank in rows[0]]
    left = sum(map(len, rows))
    for group in batched(rows, -(-len(rows) // _PARTS)):
        ranks = sum(map(len, group))
        work = stock.work * ranks // left
        slack = work // (_SLACK if ranks == 1 else 4 * _SLACK)
        hand = _Hand(stock, ranks * local, work, slack)
        hand.fill()
        held = sorted(hand.shares, key=lambda share: (-share[2], share[0]))
        yield from _dealt(_Stock(np.array(held).T), group, local)
        stock, left = hand.stock, left - ranks


@dataclass(frozen=True, slots=True)
class _Deal:
    """How many tokens of each item the ranks get."""

    items: _Items
    shares: Mapping[int, dict[int, int]]  # of an item, by rank
    nodes: _Ints  # of each rank
    slack: int

    @classmethod
    def of(cls, work: _Work, local: int, nodes: Sequence[Hashable]) -> "_Deal":
        """Deal to nodes, and what a node has to its ranks."""
        items, rows = _Items.of(work, local // _FEW), by_node(nodes)
        order = np.argsort(-items.rate, kind="stable")
        stock = _Stock(np.stack([order, items.length[order], items.rate[order], 0 * order]))
        shares: dict[int, dict[int, int]] = {item: {} for item in order.tolist()}
        for rank, held in _dealt(stock, rows, local):
            for item, tokens, *_ in held.left.T.tolist():
                shares[item][rank] = tokens
        number = {rank: number for number, row in enumerate(rows) for rank in row}
        node = np.array([number[rank] for rank in range(len(nodes))])
        return cls(items, shares, node, stock.work // len(nodes) // _SLACK)

    def layout(self) -> Layout:
        """Choose the positions, those of long documents first."""
        held: list[list[Interval]] = [[] for _ in self.nodes]
        sent = np.zeros(len(self.nodes), np.int64)  # by each rank, twice the rows: see `_users`
        for item in self.shares:
            for rank, interval in self._places(item, sent):
                held[rank].append(interval)
        return Layout(tuple(tuple(range(*rows) for rows in joined(some)) for some in held))

    def _places(self, item: int, sent: _Ints) -> Iterator[tuple[int, Interval]]:
        """Who gets which positions of an item."""
        front = start = int(self.items.start[item])
        back = stop = start + int(self.items.length[item])
        ranks, from_both_ends = self._order(item, sent)
        for rank in ranks:
            taken = front - start + self.shares[item][rank] + stop - back
            ends = front, start + taken, back, back
            if from_both_ends:
                ends = front, start + taken // 2, stop - taken + taken // 2, back
            yield from (
                (rank, Interval(*some)) for some in (ends[:2], ends[2:]) if some[0] < some[1]
            )
            front, back = ends[1:3]

    def _order(self, item: int, sent: _Ints) -> tuple[list[int], bool]:
        """In which order ranks take their shares, and whether from the ends to the middle."""
        ranks, tokens = (np.array([*some]) for some in zip(*self.shares[item].items(), strict=True))
        every, reach = np.ones(len(ranks), bool), int(self.items.reach[item])
        less = int(tokens.min())
        if len(ranks) == 1 or reach == 0:
            return ranks.tolist(), False
        users = self._users(ranks, every)
        if len(ranks) == 2 and less * min(int(tokens.max()), reach) <= self.slack:
            first = int(tokens.argmin())  # the queries of the other see it
            sent[ranks[first]] += 2 * less * users[first]
            return [int(ranks[first]), int(ranks[1 - first])], False
        outer, inwards = every, list[int]()
        while outer.any():  # the one inside is seen by most, and is to be the least burdened
            costs = sent[ranks] + tokens * (users + self._users(ranks, outer))
            inner = int(np.where(outer, costs, np.iinfo(np.int64).max).argmin())
            sent[ranks[inner]] = costs[inner]
            outer[inner] = False
            inwards.insert(0, int(ranks[inner]))
        return inwards, True

    def _users(self, ranks: _Ints, others: NDArray[np.bool]) -> _Ints:
        """How many others each of some ranks sends to, one on another node for `_FAR`."""
        nodes = self.nodes[ranks]
        near = np.bincount(nodes[others], minlength=int(nodes.max()) + 1)[nodes]
        return _FAR * (int(others.sum()) - near) + near - 1
