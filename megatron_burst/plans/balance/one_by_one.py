"""Fills ranks, or nodes, one after the other, where documents have more work than is due to one.

A rank takes one of the longest of what is left, then others of about the length that brings its
work to the mean. A document of more work than that is shared: each takes as much of it as leaves
work for its other tokens, which are of shorter ones. What is left has always the mean, so that
there is such a mixture for everyone.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_burst.plans.visibility.band import Ints

_SHORT, _LONG = 1, 2  # what is begun, and goes on with the next one: a short item or a long one


def deal_one_by_one(
    items: Ints, room: Sequence[int], slack: int, *, is_even: bool
) -> Iterator[Ints]:
    """Give each what it gets of the items.

    Args:
        items: [4, item], columns as of a stock: number, tokens, rate, 0; the highest rates first.
        room: how many tokens each gets; all of them together.
        slack: by which share of its work, 1/slack, each may miss the mean to leave documents whole;
            0 is to cut as many as it takes to be exact.
        is_even: whether those that share a document get as much of it; else each takes as much as
            it can, and the last one what is left.
    """
    stock = _Stock(items)
    for tokens in room[:-1]:
        work = stock.work * tokens // stock.tokens
        hand = _Taker(stock, tokens, work, work // slack if slack else 0, is_even=is_even)
        yield hand.fill()
        stock = hand.stock
    yield stock.left


class _Stock:
    """What is left of the items, in arrays, the highest rates first."""

    def __init__(self, left: Ints) -> None:
        self.left = left
        self.item, self.length, self.rate, _ = left
        sums = np.zeros((2, len(self.item) + 1), np.int64)
        sums[0, 1:] = self.length
        np.multiply(self.length, self.rate, out=sums[1, 1:])
        self.ends, self.sums = sums.cumsum(axis=1)  # tokens and work before each, and of all
        self.tokens, self.work = self.ends[-1].item(), self.sums[-1].item()

    def without(self, first: int, stop: int) -> "_Stock":
        return _Stock(np.concatenate([self.left[:, :first], self.left[:, stop:]], axis=1))

    def having(self, rest: Ints) -> "_Stock":
        at = int((-self.rate).searchsorted(-rest[2, 0]))
        return _Stock(np.concatenate([self.left[:, :at], rest, self.left[:, at:]], axis=1))

    def of_first(self, tokens: Ints) -> Ints:
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
        run_work = self.sums[stop] - self.sums[first] + self.work - self.of_first(border)
        far = np.abs(run_work - work)
        fits = (far <= slack).nonzero()[0]
        if not len(fits):
            return None
        border, last = border[fits], self.ends.searchsorted(border[fits])
        loss = np.minimum(self.ends[last] - border, border - self.ends[last - 1])
        best = fits[np.lexsort((far[fits], loss))[0]]
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


class _Taker:
    """What one of them gets of the stock."""

    def __init__(self, stock: _Stock, tokens: int, work: int, slack: int, *, is_even: bool) -> None:
        self.stock, self.slack, self.is_even = stock, slack, is_even
        self.tokens, self.work = tokens, work  # what they still are to have
        self.most_begun = tokens // 2
        self.parts: list[Ints] = []  # of items, like what is left of them
        self.rests: list[Ints] = []  # of what is shared with the next ones

    def fill(self) -> Ints:
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
