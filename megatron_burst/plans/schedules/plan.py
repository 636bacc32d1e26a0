"""Who sends what to whom and computes which tile when: frozen data, no torch, no processes.

A plan is one rank's whole forward or backward. It says for every message the step at whose start
it is posted, and the step at whose end it has landed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.cells import Cells
from megatron_burst.plans.visibility.interval import Interval


class Kind(StrEnum):
    """What an item is made of."""

    KV = "kv"
    QUERY = "query"
    D_KV = "d_kv"
    D_QUERY = "d_query"
    PARTIAL_D_KV = "partial d_kv"  # of which no row is a sum of several tiles
    PARTIAL_D_QUERY = "partial d_query"
    OUTPUT = "output"  # of queries against some of the keys, with its log-sum-exp
    HEADS = "heads"  # what an all-to-all over the heads moves

    __hash__ = str.__hash__  # an enumeration's is slow, and plans look thousands of items up

    @property
    def is_result(self) -> bool:
        """Whether items of this kind are added to sums, not blocks that are read."""
        return self in _RESULTS

    @property
    def partial(self) -> "Kind":
        """Of a gradient, the kind of what one kernel call returned of it."""
        return _PARTIALS.get(self, self)

    @property
    def sum(self) -> "Kind":
        """The kind of sum that it is added to."""
        return _SUMS.get(self, self)

    @property
    def gradient(self) -> "Kind":
        """The kind of the gradient of a block of this kind."""
        return _GRADIENTS[self]

    def result(self, *, backward: bool) -> "Kind | None":
        """Return what is made of a block of this kind: of keys nothing in the forward."""
        if backward:
            return self.gradient
        return Kind.OUTPUT if self is Kind.QUERY else None

    @property
    def other(self) -> "Kind":
        """The kind of block that a block of this kind meets."""
        return {Kind.KV: Kind.QUERY, Kind.QUERY: Kind.KV}[self]


_GRADIENTS = {Kind.KV: Kind.D_KV, Kind.QUERY: Kind.D_QUERY}
_PARTIALS = {Kind.D_KV: Kind.PARTIAL_D_KV, Kind.D_QUERY: Kind.PARTIAL_D_QUERY}
_SUMS = {partial: kind for kind, partial in _PARTIALS.items()}
_RESULTS = {Kind.OUTPUT, *_PARTIALS, *_SUMS}


class Channel(StrEnum):
    """One of the communicators of a rank; messages of one channel stay in order.

    Of a grid of nodes WITHIN and ACROSS have a row's ranks, BETWEEN a column's, DIRECT all of them.
    A read in a row is WITHIN if it comes from the rank before, as in rings, else ACROSS.
    """

    READ_WITHIN = "reads within the node"
    READ_ACROSS = "direct reads within the node"
    READ_BETWEEN = "reads between nodes"
    GRADIENT_WITHIN = "gradients within the node"
    GRADIENT_BETWEEN = "gradients between nodes"
    READ_DIRECT = "direct reads between nodes"
    GRADIENT_DIRECT = "direct gradients between nodes"
    HEADS = "heads"


type Part = tuple[Interval, ...]
"""Which rows of a block: intervals in order that do not touch; () is all of them."""


class Item(NamedTuple):
    """What can be sent: the tensors of one kind that belong to one rank's tokens."""

    kind: Kind
    owner: int
    part: Part = ()  # of the owner's rows, sent one interval behind the other
    target: int | None = None  # of HEADS: whose share of the heads

    @property
    def sum(self) -> "Item":
        """What it is added to."""
        return self._replace(kind=self.kind.sum) if self.kind in _SUMS else self

    @property
    def packed(self) -> Interval | None:
        """The rows of what is sent, as many as its part has; None: as many as the owner has."""
        return Interval(0, sum(rows.length for rows in self.part)) if self.part else None

    def __str__(self) -> str:
        part = f", rows {self.part[0].start} to {self.part[-1].stop}" if self.part else ""
        part += f" in {len(self.part)} intervals" if len(self.part) > 1 else ""
        share = "" if self.target is None else f" for rank {self.target}"
        return f"{self.kind} of rank {self.owner}{part}{share}"


class Hop(NamedTuple):
    """One message as both of its ends see it."""

    item: Item
    source: int
    target: int
    channel: Channel
    leaves: int  # the step at whose start both ends post it
    lands: int  # the step at whose end both ends wait for it


class Send(NamedTuple):
    """An item on its way to a peer; what holds it must not change until it has landed."""

    item: Item
    peer: int
    channel: Channel
    lands: int


class Receive(NamedTuple):
    """An item on its way from a peer."""

    item: Item
    peer: int
    channel: Channel
    lands: int


type Transfer = Send | Receive


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """The tiles of one query block and one key block: a kernel call, or several.

    A tile is rows of one rank's queries against rows of one rank's keys. Every query of it sees a
    key: neither loops nor kernels know rows that see nothing. The rows are counted in the whole of
    what the owner has; where only a part of it comes, the part is named.
    """

    query_owner: int
    key_owner: int
    cells: Cells
    """The same object where pairs of ranks see the same."""
    query_part: Part = ()
    key_part: Part = ()

    def __len__(self) -> int:
        return len(self.cells)

    @property
    def blocks(self) -> tuple[Item, Item]:
        """The query and the key block that are read."""
        return (
            Item(Kind.QUERY, self.query_owner, self.query_part),
            Item(Kind.KV, self.key_owner, self.key_part),
        )

    @property
    def output(self) -> Item:
        """The output that is added to."""
        return Item(Kind.OUTPUT, self.query_owner, self.query_part)

    @property
    def gradients(self) -> tuple[Item, Item]:
        """The query and the key gradient that are added to."""
        return (
            Item(Kind.D_QUERY, self.query_owner, self.query_part),
            Item(Kind.D_KV, self.key_owner, self.key_part),
        )

    @property
    def slices(self) -> Cells:
        """The cells, counted in the parts of the blocks that are read."""
        queries = _packed(self.cells.queries, self.query_part)
        keys = _packed(self.cells.keys, self.key_part)
        return Cells(np.hstack([queries, keys]), self.cells.sides)

    def having(self, cells: Cells) -> "Tiles":
        """Return other tiles of the same blocks."""
        return replace(self, cells=cells)

    def rows_of(self, kind: Kind) -> list[Interval]:
        """Return the rows of the KV or QUERY block that each tile reads, counted in the whole."""
        rows = self.cells.keys if kind is Kind.KV else self.cells.queries
        return [Interval(*ends) for ends in rows.tolist()]

    def reading(self, kind: Kind, part: Part) -> "Tiles":
        """Return the tiles that read their KV or QUERY block from this part of its rows."""
        if kind is Kind.KV:
            return replace(self, key_part=part)
        return replace(self, query_part=part)


def _packed(rows: Ints, part: Part) -> Ints:
    """Count rows, [cell, 2], in a part of which no cell lies in two intervals."""
    if not part:
        return rows
    starts, stops = np.array(part).T
    missing = starts - np.append(0, (stops - starts).cumsum()[:-1])  # before each interval
    return rows - missing[starts.searchsorted(rows[:, :1], "right") - 1]


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that are posted together and the tiles that are computed meanwhile.

    A block can be used in the steps after the one in which it landed, until it lands again. A
    result, an output or a gradient, that lands is added to what the rank has of it. A result that
    is sent is handed on: the rank's sum is empty.
    """

    receives: tuple[Receive, ...] = ()
    sends: tuple[Send, ...] = ()
    blocks: tuple[Tiles, ...] = ()
    """The tiles, in the order they are computed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's forward or backward, step by step."""

    rank: int
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, rank: int, hops: Iterable[Hop], tiles: Mapping[int, Sequence[Tiles]]) -> "Plan":
        """Return the plan of `rank`, given the hops of all ranks and its own tiles, by step.

        Steps in which nothing happens are dropped. Hops that the two ends post in one step must
        come in one order, the same for all ranks.
        """
        ours = [hop for hop in hops if rank in (hop.source, hop.target)]
        blocks = {step: tuple(filter(len, of_step)) for step, of_step in tiles.items()}
        busy = {step for hop in ours for step in (hop.leaves, hop.lands)}
        busy |= {step for step, of_step in blocks.items() if of_step}
        number = {step: index for index, step in enumerate(sorted(busy))}
        receives, sends = defaultdict[int, list[Receive]](list), defaultdict[int, list[Send]](list)
        for item, source, target, channel, leaves, lands in ours:
            if target == rank:
                receives[leaves].append(Receive(item, source, channel, number[lands]))
            else:
                sends[leaves].append(Send(item, target, channel, number[lands]))
        steps = (Step(tuple(receives[n]), tuple(sends[n]), blocks.get(n, ())) for n in number)
        return cls(rank, tuple(steps))

    @property
    def sends(self) -> tuple[Send, ...]:
        """All messages that leave, in the order they are posted."""
        return tuple(send for step in self.steps for send in step.sends)

    @property
    def receives(self) -> tuple[Receive, ...]:
        """All messages that arrive, in the order they are posted."""
        return tuple(receive for step in self.steps for receive in step.receives)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All messages, those that arrive first."""
        return *self.receives, *self.sends

    @property
    def moved(self) -> set[Kind]:
        """The kinds of what is sent or received."""
        return {transfer.item.kind for transfer in self.transfers}
