"""Chooses the positions of documents that were dealt to ranks, given how many tokens each gets.

Of a shared document a rank takes as many tokens from the front as from the back, so that its
queries, and its keys, have the mean of the pairs. Whoever is farther inside sends more rows; that
is to be a rank with few tokens of it, and that sends few of others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from megatron_burst.plans.balance.document_work import DocumentItems
from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.layout import Layout

_FAR = 64  # how much worse it is to send to another node


@dataclass(frozen=True, slots=True)
class Shares:
    """How many tokens of each item the ranks get."""

    items: DocumentItems
    shares: Ints  # [item, tokens and rank, share], by item
    nodes: Sequence[int]  # of each rank
    slack: int  # how much more queries than keys may have, that ends need not be shared evenly

    def layout(self) -> Layout:
        """Choose the positions, those of long documents first."""
        shares = self.shares[:, self.shares[1] > 0]
        is_shared = np.bincount(shares[0])[shares[0]] > 1
        item, tokens, rank = shares[:, ~is_shared]
        alone = np.stack([rank, self.items.start[item], self.items.start[item] + tokens])
        shared = shares[:, is_shared]
        shared = shared[:, np.lexsort((shared[0], -self.items.rate[shared[0]]))]
        places, sent = list[tuple[int, int, int]](), [0] * len(self.nodes)
        for number, parts in groupby(shared.T.tolist(), key=itemgetter(0)):
            places += self._places(number, {rank: tokens for _, tokens, rank in parts}, sent)
        every = np.concatenate([alone, np.array(places, np.int64).reshape(-1, 3).T], axis=1)
        every = every[:, every[1] < every[2]]
        return _laid_out(every[:, self._order(every)], len(self.nodes))

    def _order(self, places: Ints) -> Ints:
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


def _laid_out(places: Ints, ranks: int) -> Layout:
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
