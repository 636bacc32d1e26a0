"""Who sends what to whom and computes which tile when: frozen data, no torch, no processes.

A plan is one rank's whole forward or backward. It is put together from the hops of all ranks, so
that a send and its receive come from one line, and says for every message the step at whose start
it is posted, the step at whose end it has landed, and the buffer it lands in.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from megatron_burst.plans.layout import Interval
from megatron_burst.plans.mask import Band


class Kind(StrEnum):
    """What an item is made of."""

    KV = "kv"
    QUERY = "query"
    D_KV = "d_kv"
    D_QUERY = "d_query"
    OUTPUT = "output"  # of queries against some of the keys, with its log-sum-exp
    HEADS = "heads"  # what an all-to-all over the heads moves

    @property
    def is_result(self) -> bool:
        """Whether items of this kind are sums that grow, not blocks that are read."""
        return self in (Kind.OUTPUT, Kind.D_KV, Kind.D_QUERY)

    @property
    def gradient(self) -> "Kind":
        """The kind of the gradient of a block of this kind."""
        return {Kind.KV: Kind.D_KV, Kind.QUERY: Kind.D_QUERY}[self]

    def result(self, *, backward: bool) -> "Kind | None":
        """Return what is made of a block of this kind: of keys nothing in the forward."""
        if backward:
            return self.gradient
        return Kind.OUTPUT if self is Kind.QUERY else None

    @property
    def other(self) -> "Kind":
        """The kind of block that a block of this kind meets."""
        return {Kind.KV: Kind.QUERY, Kind.QUERY: Kind.KV}[self]


class Channel(StrEnum):
    """One of the communicators of a group; messages of one channel stay in order."""

    READ_WITHIN = "reads within the node"
    READ_BETWEEN = "reads between nodes"
    GRADIENT_WITHIN = "gradients within the node"
    GRADIENT_BETWEEN = "gradients between nodes"


class Item(NamedTuple):
    """What can be sent: the tensors of one kind that belong to one rank's tokens."""

    kind: Kind
    owner: int
    part: Interval | None = None  # which of the owner's rows; None: all
    target: int | None = None  # of HEADS: whose share of the heads

    def __str__(self) -> str:
        part = f", rows {self.part.start} to {self.part.stop}" if self.part else ""
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
    """An item on its way from a peer into one of the buffers of its kind."""

    item: Item
    peer: int
    channel: Channel
    lands: int
    buffer: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one rank's queries against rows of one rank's keys: a kernel call, or part of one.

    Every query sees a key: neither loops nor kernels know rows that see nothing. The rows are
    counted in the whole of what the owner has. Where only a part of it comes, the part is named,
    and `query_slice` and `key_slice` count in it.
    """

    query_owner: int
    key_owner: int
    query_rows: Interval
    key_rows: Interval
    band: Band
    query_part: Interval | None = None
    key_part: Interval | None = None

    def __post_init__(self) -> None:
        queries, keys = self.query_rows.length, self.key_rows.length
        assert self.band.reaches_all(queries, keys), f"{self} has queries that see nothing"

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs the tile's mask lets through."""
        return self.band.pairs(self.query_rows.length, self.key_rows.length)

    @property
    def is_banded(self) -> bool:
        """Whether the tile is neither full nor a causal square."""
        return self.band.is_banded(self.query_rows.length, self.key_rows.length)

    @property
    def blocks(self) -> tuple[Item, Item]:
        """The query and the key block that it reads."""
        return (
            Item(Kind.QUERY, self.query_owner, self.query_part),
            Item(Kind.KV, self.key_owner, self.key_part),
        )

    @property
    def output(self) -> Item:
        """The output that it adds to."""
        return Item(Kind.OUTPUT, self.query_owner, self.query_part)

    @property
    def gradients(self) -> tuple[Item, Item]:
        """The query and the key gradient that it adds to."""
        return (
            Item(Kind.D_QUERY, self.query_owner, self.query_part),
            Item(Kind.D_KV, self.key_owner, self.key_part),
        )

    def rows_of(self, kind: Kind) -> Interval:
        """Return the rows of its KV or QUERY block, counted in the whole."""
        return self.key_rows if kind is Kind.KV else self.query_rows

    def reading(self, kind: Kind, part: Interval) -> "Tile":
        """Return the tile that reads its KV or QUERY block from this part of the owner's rows."""
        if kind is Kind.KV:
            return replace(self, key_part=part)
        return replace(self, query_part=part)

    @property
    def query_slice(self) -> Interval:
        """The rows of the query block."""
        return self.query_rows.within(self.query_part)

    @property
    def key_slice(self) -> Interval:
        """The rows of the key block."""
        return self.key_rows.within(self.key_part)


@dataclass(frozen=True, slots=True)
class Step:
    """Messages that are posted together and the tiles that are computed meanwhile.

    A block can be used in the steps after the one in which it landed, until it lands again. A
    result, an output or a gradient, that lands is added to what the rank has of it. A result that
    is sent is handed on: the rank's sum is empty.
    """

    receives: tuple[Receive, ...] = ()
    sends: tuple[Send, ...] = ()
    tiles: tuple[Tile, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's forward or backward, step by step."""

    rank: int
    steps: tuple[Step, ...]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles in the order they are computed."""
        return tuple(tile for step in self.steps for tile in step.tiles)

    @property
    def sends(self) -> tuple[Send, ...]:
        """All messages that leave, in the order they are posted."""
        return tuple(send for step in self.steps for send in step.sends)

    @property
    def receives(self) -> tuple[Receive, ...]:
        """All messages that arrive, in the order they are posted."""
        return tuple(receive for step in self.steps for receive in step.receives)

    @property
    def most_sums(self) -> Counter[Kind]:
        """Of each kind, how many of others' results arrivals are being added to, at the most."""
        begun: dict[Item, int] = {}
        there: dict[Kind, Counter[int]] = defaultdict(Counter)  # by step
        for step in self.steps:
            for send in step.sends:
                steps = range(begun.pop(send.item, send.lands) + 1, send.lands + 1)
                there[send.item.kind].update(steps)
            for receive in step.receives:
                if receive.item.kind.is_result and receive.item.owner != self.rank:
                    begun.setdefault(receive.item, receive.lands)
        return Counter({kind: max(some.values(), default=0) for kind, some in there.items()})

    @property
    def largest_arrivals(self) -> dict[tuple[Kind, int], Item]:
        """For each buffer, by kind and number, the largest item that lands in it."""
        largest: dict[tuple[Kind, int], Item] = {}
        for item, *_, buffer in self.receives:
            known = largest.setdefault((item.kind, buffer), item)
            if known.part and (item.part is None or item.part.length > known.part.length):
                largest[item.kind, buffer] = item
        return largest


def assemble(rank: int, hops: Iterable[Hop], tiles: Mapping[int, Sequence[Tile]]) -> Plan:
    """Put together the plan of `rank` from the hops of all ranks and its own tiles, by step.

    Steps in which nothing happens are dropped. Hops that the two ends post in one step must come in
    one order, the same for all ranks.
    """
    ours = [hop for hop in hops if rank in (hop.source, hop.target)]
    busy = {t for hop in ours for t in (hop.leaves, hop.lands)} | {t for t in tiles if tiles[t]}
    number = {step: index for index, step in enumerate(sorted(busy))}
    ours = [Hop(*hop[:4], number[hop.leaves], number[hop.lands]) for hop in ours]
    buffers = _buffers(rank, ours, {number[t]: tiles[t] for t in tiles if tiles[t]})
    receives: dict[int, list[Receive]] = defaultdict(list)
    sends: dict[int, list[Send]] = defaultdict(list)
    for index, hop in enumerate(ours):
        if hop.target == rank:
            receive = Receive(hop.item, hop.source, hop.channel, hop.lands, buffers[index])
            receives[hop.leaves].append(receive)
        else:
            sends[hop.leaves].append(Send(hop.item, hop.target, hop.channel, hop.lands))
    return Plan(
        rank,
        tuple(
            Step(tuple(receives[index]), tuple(sends[index]), tuple(tiles.get(step, ())))
            for step, index in number.items()
        ),
    )


def _buffers(rank: int, hops: Sequence[Hop], tiles: Mapping[int, Sequence[Tile]]) -> dict[int, int]:
    """Give each message that arrives, by number, the first buffer of its kind that is free then."""
    last_use = _last_uses(rank, hops, tiles)
    busy_until: dict[Kind, list[int]] = defaultdict(list)
    chosen = {}
    for number in sorted(sorted(last_use), key=lambda number: hops[number].leaves):
        ends = busy_until[hops[number].item.kind]
        free = (index for index, end in enumerate(ends) if end < hops[number].leaves)
        index = next(free, len(ends))
        ends[index : index + 1] = [last_use[number]]
        chosen[number] = index
    return chosen


def _last_uses(
    rank: int, hops: Sequence[Hop], tiles: Mapping[int, Sequence[Tile]]
) -> dict[int, int]:
    """Return for each message that arrives, by number, the last step that needs its buffer.

    A block stays for its tiles and until its sends have landed, or until it has landed again. A
    result is added at once.
    """
    order = [number for number, hop in enumerate(hops) if hop.target == rank]
    order.sort(key=lambda number: (hops[number].lands, hops[number].leaves))
    arrivals: dict[Item, list[int]] = defaultdict(list)
    for number in order:
        arrivals[hops[number].item].append(number)
    last = {number: hops[number].lands for number in order}
    reads = attrgetter("query_owner", "key_owner", "query_part", "key_part")
    some = {
        (step, reads(tile)): tile for step in tiles for tile in tiles[step]
    }  # of like tiles one
    blocks = {(step, item) for (step, _), tile in some.items() for item in tile.blocks}
    uses = [(step, step, item) for step, item in blocks]
    passed_on = (hop for hop in hops if hop.source == rank and not hop.item.kind.is_result)
    uses += [(hop.leaves, hop.lands, hop.item) for hop in passed_on]
    for begins, ends, item in uses:
        if there := [n for n in arrivals.get(item, ()) if hops[n].lands < begins]:
            last[there[-1]] = max(last[there[-1]], ends)
    return last
