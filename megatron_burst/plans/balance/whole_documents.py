"""Deals documents whole, where hardly one has more work than is due to a rank, or to a node.

The longest first, each to the one that has the most work left for the tokens that it still gets. So
all of them keep short documents to the end, and only those are cut where tokens have to come out
even.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from megatron_burst.plans.visibility.band import Ints


def deal_whole(
    items: Ints, room: Sequence[int], slack: int, cuts: int, *, is_even: bool = True
) -> list[Ints] | None:
    """Return what each gets of the items; None where too many would have to be cut.

    Args:
        items: [4, item], columns as of a stock: number, tokens, rate, 0; the highest rates first.
        room: how many tokens each gets; all of them together.
        slack: by which share of its work, 1/slack, each may have more.
        cuts: how often a document may be cut, for each of them.
        is_even: whether those that share a document get as much of it, if there is work for it;
            else each takes as much as it can, and the last one what is left.
    """
    rest = _Rest(items)
    hands = [_Share(number, n, rest.work * n // rest.tokens) for number, n in enumerate(room)]
    due, left = max(hand.work for hand in hands), cuts * len(room)
    if int(((items[1] * items[2] - 1) // due).sum()) > left:
        return None
    order = sorted(hands, key=_Share.order)
    for item in zip(*items.tolist(), strict=True):
        shares = [*_shares(item, order, rest, due // slack, is_even=is_even)]
        left -= len(shares) - 1
        if not shares or left < 0:
            return None
        for hand, tokens in shares:
            order.remove(hand)
            hand.take(item, tokens)
            if hand.tokens:
                insort(order, hand, key=_Share.order)
    return [np.array(hand.parts, np.int64).T for hand in hands]


class _Rest:
    """The work of so many tokens of the shortest documents."""

    def __init__(self, items: Ints) -> None:
        tokens, rates = items[1:3, ::-1].tolist()
        each = (n * rate for n, rate in zip(tokens, rates, strict=True))
        self.ends, self.sums = [*accumulate(tokens)], [*accumulate(each)]
        self.tokens, self.work, self.rates = self.ends[-1], self.sums[-1], rates

    def of(self, tokens: int) -> int:
        if tokens <= 0:
            return 0
        at = bisect_left(self.ends, tokens)
        return int(self.sums[at] - (self.ends[at] - tokens) * self.rates[at])


@dataclass(slots=True, eq=False)
class _Share:
    """What a rank, or a node, gets."""

    number: int
    tokens: int  # that it still gets
    work: int  # that it should have of them
    parts: list[tuple[int, ...]] = field(default_factory=list)

    def order(self) -> tuple[int, int]:
        """Who needs the longest documents most is first."""
        return -self.work // self.tokens, self.number

    def take(self, item: tuple[int, ...], tokens: int) -> None:
        number, _, rate, begun = item
        self.parts.append((number, tokens, rate, begun))
        self.tokens -= tokens
        self.work -= tokens * rate

    def most(self, item: tuple[int, ...], least: int, slack: int) -> int:
        """How much of an item there is work for, if a token of the others has the least."""
        _, length, rate, _ = item
        if rate <= least:
            return min(length, self.tokens)
        most = (self.work + slack - self.tokens * least) // (rate - least)
        return max(0, min(length, self.tokens, most))


def _shares(
    item: tuple[int, ...], order: Sequence[_Share], rest: _Rest, slack: int, *, is_even: bool
) -> Iterator[tuple[_Share, int]]:
    """Give an item to the first that can take it whole; or to as few as can together."""
    _, length, rate, _ = item
    for hand in order:
        beside = hand.tokens - length
        if beside >= 0 and length * rate + rest.of(beside) <= hand.work + slack:
            yield hand, length
            return
    for count in range(2, len(order) + 1):
        hands = order[:count]
        beside = max(1, sum(hand.tokens for hand in hands) - length)
        least = rest.of(beside) // beside
        most = {hand: hand.most(item, least, slack) for hand in hands}
        if sum(most.values()) >= length:
            for number, hand in enumerate(sorted(hands, key=most.__getitem__, reverse=not is_even)):
                due = -(-length // (count - number)) if is_even else length
                tokens = min(most[hand], due)
                length -= tokens
                if tokens:
                    yield hand, tokens
            return
