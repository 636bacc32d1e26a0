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

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import batched, groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.layout import Layout, zigzag
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
    for is_exact in (False, True):  # cuts more documents, where whole ones are too large
        if uneven > BOUND:
            deal = _Deal.of(_Work.of(mask, tokens), tokens // len(nodes), nodes, is_exact=is_exact)
            dealt = deal.layout()
            found = (uneven, layout), (imbalance(dealt, mask), dealt)
            uneven, layout = min(found, key=itemgetter(0))
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
        first = (np.concatenate([[True], ~again])).nonzero()[0]
        length = np.add.reduceat(work.lengths, first)
        rate = 2 * np.add.reduceat(work.pairs, first) // length
        reach = np.minimum(np.maximum.reduceat(work.lengths, first), work.window)
        return cls(work.starts[first], length, rate, reach if work.is_causal else 0 * reach)


class _Stock:
    """What is left of the items, in arrays, the highest rates first."""

    def __init__(self, left: _Ints) -> None:
        self.left = left
        self.item, self.length, self.rate, self.begun = left

    @cached_property
    def ends(self) -> _Ints:
        """The tokens before each item, and those of all."""
        ends = np.zeros(len(self.item) + 1, np.int64)
        self.length.cumsum(out=ends[1:])
        return ends

    @cached_property
    def sums(self) -> _Ints:
        """The work before each item, and that of all."""
        sums = np.zeros(len(self.item) + 1, np.int64)
        (self.length * self.rate).cumsum(out=sums[1:])
        return sums

    @property
    def tokens(self) -> int:
        return int(self.ends[-1])

    @property
    def work(self) -> int:
        return int(self.sums[-1])

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
        return self.work - int(self.of_first(np.array(self.tokens - tokens))) if tokens else 0

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
            if self.tokens:
                self._take(number, is_shared=True)
        if self.tokens and not has_long:
            self._take(0, is_shared=True)
        while self.tokens:
            if self.slack and (run := self.stock.run(self.tokens, self.work, self.slack)):
                self._hold(*run)
                self._hold_last()
            else:
                dense = self.stock.dense(self.tokens, self.work) if self.slack else 0
                self._take(dense, is_shared=False)
        for rest in self.rests:
            self.stock = self.stock.having(rest)
        return np.concatenate(self.parts, axis=1)

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
                self._hold_last()

    def _most(self, length: int, rate: int) -> int:
        """How many tokens of an item there is work for, with the shortest ones for the others."""
        least, most = max(0, self.tokens - self.stock.tokens), min(length, self.tokens)
        goal = self.work + self.slack
        if most * rate + self.stock.of_last(self.tokens - most) <= goal:
            return most
        return min(most, max(least, self.stock.room(self.tokens, goal, rate)))

    def _hold(self, first: int, stop: int) -> None:
        """Take all of some items."""
        stock = self.stock
        self.parts.append(stock.left[:, first:stop])
        self.tokens -= int(stock.ends[stop] - stock.ends[first])
        self.work -= int(stock.sums[stop] - stock.sums[first])
        self.stock = stock.without(first, stop)

    def _hold_last(self) -> None:
        """Fill up with the shortest documents."""
        if not self.tokens:
            return
        ends = self.stock.ends
        self._hold(int(ends.searchsorted(ends[-1] - self.tokens)), len(ends) - 1)
        if tokens := self.tokens:
            left = self.stock.left.copy()
            part, rest = left[:, -1:].copy(), int(left[1, -1]) - tokens
            part[1], left[1, -1] = tokens, rest
            left[3, -1] = _SHORT if rest <= self.most_begun else 0
            self.parts.append(part)
            self.stock, self.tokens = _Stock(left), 0


def _dealt(
    stock: _Stock, rows: Sequence[tuple[int, ...]], local: int, *, is_exact: bool
) -> Iterator[tuple[int, _Ints]]:
    """Give each rank what it holds: deal to a few groups of nodes, of those to nodes, to ranks."""
    if len(rows) == 1:
        if len(rows[0]) == 1:
            yield rows[0][0], stock.left
            return
        rows = [(rank,) for rank in rows[0]]
    left = sum(map(len, rows))
    for group in batched(rows, -(-len(rows) // _PARTS)):
        ranks, held = sum(map(len, group)), stock.left
        if ranks < left:
            work = stock.work * ranks // left
            slack = 0 if is_exact else work // (_SLACK if ranks == 1 else 4 * _SLACK)
            is_even = ranks > 1 and not is_exact
            hand = _Hand(stock, ranks * local, work, slack, is_even=is_even)
            held, stock, left = hand.fill(), hand.stock, left - ranks
        held = held[:, np.lexsort((held[0], -held[2]))]
        held[3] = 0
        yield from _dealt(_Stock(held), group, local, is_exact=is_exact)


@dataclass(frozen=True, slots=True)
class _Deal:
    """How many tokens of each item the ranks get."""

    items: _Items
    shares: _Ints  # [item, tokens and rank, share]
    nodes: _Ints  # of each rank
    slack: int

    @classmethod
    def of(cls, work: _Work, local: int, nodes: Sequence[Hashable], *, is_exact: bool) -> "_Deal":
        """Deal to nodes, and what a node has to its ranks."""
        items, rows = _Items.of(work, local // _FEW), by_node(nodes)
        order = np.argsort(-items.rate, kind="stable")
        stock = _Stock(np.stack([order, items.length[order], items.rate[order], 0 * order]))
        shares = [
            np.stack([*held[:2], np.full(held.shape[1], rank)])
            for rank, held in _dealt(stock, rows, local, is_exact=is_exact)
        ]
        number = {rank: number for number, row in enumerate(rows) for rank in row}
        node = np.array([number[rank] for rank in range(len(nodes))])
        slack = stock.work // len(nodes) // _SLACK
        return cls(items, np.concatenate(shares, axis=1), node, slack)

    def layout(self) -> Layout:
        """Choose the positions, those of long documents first."""
        shares = self.shares[:, self.shares[1] > 0]
        is_shared = np.bincount(shares[0])[shares[0]] > 1
        item, tokens, rank = shares[:, ~is_shared]
        alone = np.stack([rank, self.items.start[item], self.items.start[item] + tokens])
        sent = np.zeros(len(self.nodes), np.int64)  # by each rank, twice the rows: see `_users`
        shared = shares[:, is_shared]
        shared = shared[:, np.lexsort((shared[0], -self.items.rate[shared[0]]))]
        each = groupby(shared.T.tolist(), key=itemgetter(0))
        places = [place for item, some in each for place in self._places(item, [*some], sent)]
        every = np.concatenate([alone, np.array(places, np.int64).reshape(-1, 3).T], axis=1)
        return _laid_out(every, len(self.nodes))

    def _places(
        self, item: int, shares: Sequence[Sequence[int]], sent: _Ints
    ) -> Iterator[tuple[int, int, int]]:
        """Who gets which positions of an item: from the ends to the middle, or one by one."""
        front = start = int(self.items.start[item])
        back = stop = start + int(self.items.length[item])
        tokens, ranks = np.array(shares).T[1:]
        reach, less = int(self.items.reach[item]), int(tokens.min())
        is_plain, order = reach == 0, range(len(ranks))
        if reach and len(ranks) == 2 and less * min(int(tokens.max()), reach) <= self.slack:
            is_plain, order = True, np.argsort(tokens, kind="stable").tolist()
            sent[ranks[order[0]]] += 2 * less * int(self._users(ranks, tokens > 0)[order[0]])
        elif reach:
            order = self._inwards(ranks, tokens, sent)
        for number in order:
            taken = front - start + int(tokens[number]) + stop - back
            after = start + (taken if is_plain else taken // 2)
            yield int(ranks[number]), front, after
            if not is_plain:
                yield int(ranks[number]), stop - (taken - taken // 2), back
                back = stop - (taken - taken // 2)
            front = after

    def _inwards(self, ranks: _Ints, tokens: _Ints, sent: _Ints) -> list[int]:
        """In which order ranks take from the ends to the middle, so that none sends too much.

        The one inside is seen by most, and is to be the least burdened.
        """
        outer, inside = np.ones(len(ranks), bool), list[int]()
        users = self._users(ranks, outer)
        while outer.any():
            costs = sent[ranks] + tokens * (users + self._users(ranks, outer))
            inner = int(np.where(outer, costs, np.iinfo(np.int64).max).argmin())
            sent[ranks[inner]] = costs[inner]
            outer[inner] = False
            inside.append(inner)
        return inside[::-1]

    def _users(self, ranks: _Ints, others: NDArray[np.bool]) -> _Ints:
        """How many others each of some ranks sends to, one on another node for `_FAR`."""
        nodes = self.nodes[ranks]
        near = np.bincount(nodes[others], minlength=int(nodes.max()) + 1)[nodes]
        return _FAR * (int(others.sum()) - near) + near - 1


def _laid_out(places: _Ints, ranks: int) -> Layout:
    """Return the layout of these ranks and ranges, in order, neighbours joined."""
    owner, start, stop = places[:, places[1] < places[2]]
    order = np.lexsort((start, owner))
    owner, start, stop = owner[order], start[order], stop[order]
    first = np.r_[True, (owner[1:] != owner[:-1]) | (start[1:] != stop[:-1])].nonzero()[0]
    last = np.r_[first[1:], len(owner)] - 1
    shards: list[list[range]] = [[] for _ in range(ranks)]
    for rank, *ends in zip(
        owner[first].tolist(), start[first].tolist(), stop[last].tolist(), strict=True
    ):
        shards[rank].append(range(*ends))
    return Layout(tuple(map(tuple, shards)))
