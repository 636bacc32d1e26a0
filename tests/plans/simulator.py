"""Carry out the plans of all ranks on symbols, without processes, and fail where they are wrong."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_burst.plans.schedules.plan import (
    Channel,
    Item,
    Kind,
    Part,
    Plan,
    Receive,
    Send,
    Step,
    Tiles,
    Transfer,
)
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.visibility.band import Band
from megatron_burst.plans.visibility.cells import Cell, Cells
from megatron_burst.plans.visibility.interval import Interval, union_of
from megatron_burst.tools.plan.timing import most_arrived

type _Sum = Counter[Tile]


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one rank's queries against rows of one rank's keys, as `Tiles` has them."""

    query_owner: int
    key_owner: int
    query_rows: Interval
    key_rows: Interval
    band: Band
    query_part: Part = ()
    key_part: Part = ()

    def __post_init__(self) -> None:
        queries, keys = self.query_rows.length, self.key_rows.length
        assert self.band.reaches_all(queries, keys), f"{self} has queries that see nothing"

    @property
    def pairs(self) -> int:
        return self.band.pairs(self.query_rows.length, self.key_rows.length)

    def rows_of(self, kind: Kind) -> Interval:
        return self.key_rows if kind is Kind.KV else self.query_rows


def tiles_of(some: Plan | Step | Tiles) -> list[Tile]:
    """Return all tiles, in the order they are computed."""
    if isinstance(some, Tiles):
        owners, parts = (some.query_owner, some.key_owner), (some.query_part, some.key_part)
        return [Tile(*owners, *cell, *parts) for cell in some.cells]
    parts = some.steps if isinstance(some, Plan) else some.blocks
    return [tile for part in parts for tile in tiles_of(part)]


def plans_of(schedule: Schedule, backward: bool) -> list[Plan]:
    make = schedule.backward if backward else schedule.forward
    return [make(rank) for rank in range(schedule.tiling.ranks)]


def blocks_of(tiles: Sequence[Tile]) -> list[Tiles]:
    """Return tiles block by block, in the order of the first of each."""
    cells = defaultdict[tuple[Any, ...], list[Cell]](list)
    for tile in tiles:
        blocks = tile.query_owner, tile.key_owner, tile.query_part, tile.key_part
        cells[blocks].append(Cell(tile.query_rows, tile.key_rows, tile.band))
    return [Tiles(q, k, Cells.of(some), *parts) for (q, k, *parts), some in cells.items()]


def payload(item: Item, sizes: Mapping[Kind, int], local_tokens: int) -> int:
    """Return the bytes of an item, or of the part of it that is sent; see `traffic`."""
    if item.packed is None:
        return sizes[item.kind]
    assert local_tokens, f"{item} is a part, but of how many rows was not said"
    return sizes[item.kind] * item.packed.length // local_tokens


def bytes_sent(plan: Plan, sizes: Mapping[Kind, int], local_tokens: int = 0) -> int:
    """Return the payload bytes that the plan's rank sends; see `cost.traffic`."""
    return sum(payload(send.item, sizes, local_tokens) for send in plan.sends)


def bytes_held(plan: Plan, sizes: Mapping[Kind, int], backward: bool) -> int:
    """Return the most bytes of what arrives and of others' results, of the sizes as sent."""
    arrived = sum(sizes[kind] * number for kind, number in most_arrived(plan).items())
    sent_as = {send.item.sum: send.item.kind for send in plan.sends}
    sums, most = dict[Item, int](), 0
    landing: dict[int, list[Transfer]] = defaultdict(list)
    for number, step in enumerate(plan.steps):
        for message in (*step.receives, *step.sends):
            if message.item.kind.is_result and message.item.owner != plan.rank:
                landing[message.lands].append(message)
        for item in (item for tiles in step.blocks for item in results_of(tiles, backward)):
            if item.owner != plan.rank:
                sums[item] = sizes[sent_as[item]]
        most = max(most, sum(sums.values()))
        for message in landing[number]:
            if isinstance(message, Send):
                sums.pop(message.item.sum)
            else:
                sums[message.item.sum] = sizes[message.item.sum.kind]
    return arrived + most


class PlanError(Exception):
    """A set of plans that would hang or compute something wrong."""


def simulate(plans: Sequence[Plan], *, backward: bool, pairs: int | None = None) -> None:
    """Run one plan a rank and check that together they do the whole work, once.

    Checked: no tile is computed twice, and all together make up the `pairs` of tokens that the mask
    lets through, where these are given; a send meets a receive of the same item in the same order,
    nobody waits for ever even where the batches of a rank go one by one (as on NCCL), a tile reads
    only blocks that its rank has, no sum of tiles is sent as a partial, nothing is left over, and
    every output (backward: gradient) is at its owner at the end with each tile's partial in it
    exactly once.

    Raises:
        PlanError: with the rank, the step and the item.
    """
    machine = _Machine([_Rank(plan, backward) for plan in plans])
    while any(not rank.done for rank in machine.ranks):
        machine.move_queues()
        moved = [machine.advance(rank) for rank in machine.ranks]
        if not any(moved):
            waiting = [str(rank) for rank in machine.ranks if not rank.done]
            raise PlanError(f"nobody can go on: {'; '.join(waiting)}")
    machine.check_nothing_left()
    _check_tiles(plans, pairs)
    _check_results(machine.ranks, backward)


def results_of(tiles: Tiles, backward: bool) -> tuple[Item, ...]:
    """Return what tiles add to."""
    return tiles.gradients if backward else (tiles.output,)


@dataclass
class _Message:
    """One transfer at one of its ends."""

    transfer: Transfer
    posted: int  # the step
    payload: _Sum = field(default_factory=Counter)  # of a gradient that is sent
    other_end: "_Message | None" = None
    active: bool = False  # its batch is at the head of its rank's queue

    @property
    def through(self) -> bool:
        return self.other_end is not None and self.active and self.other_end.active

    def __str__(self) -> str:
        verb, side = ("send", "to") if isinstance(self.transfer, Send) else ("receive", "from")
        return f"{verb} {self.transfer.item} {side} rank {self.transfer.peer}"


@dataclass
class _Rank:
    plan: Plan
    backward: bool
    step: int = 0
    posted: bool = False
    blocks: set[Item] = field(default_factory=set)
    unused: set[Item] = field(default_factory=set)  # blocks that arrived and were not looked at
    sums: dict[Item, _Sum] = field(default_factory=lambda: defaultdict(Counter))
    flying: list[_Message] = field(default_factory=list)
    queue: list[list[_Message]] = field(default_factory=list)  # batches that are not through

    def __post_init__(self) -> None:
        self.blocks = {Item(kind, self.plan.rank) for kind in (Kind.KV, Kind.QUERY)}

    @property
    def done(self) -> bool:
        return self.step == len(self.plan.steps)

    @property
    def current(self) -> Step:
        return self.plan.steps[self.step]

    def compute(self) -> None:
        for tiles in self.current.blocks:
            for item in tiles.blocks:
                if item not in self.blocks:
                    raise self.error(f"computes with {item}, which it does not have")
                self.unused.discard(item)
            for item in results_of(tiles, self.backward):
                self.sums[item].update(tiles_of(tiles))

    def post(self) -> list[_Message]:
        sends = [self._send(send) for send in self.current.sends]
        receives = [_Message(receive, self.step) for receive in self.current.receives]
        self.flying += sends + receives
        # What goes together, and in which order, is as in `comm.Transfers.post`.
        batches: dict[tuple[Channel, int], list[_Message]] = defaultdict(list)
        for message in (*receives, *sends):
            batches[message.transfer.channel, message.transfer.lands].append(message)
        order = list(Channel)
        for key in sorted(batches, key=lambda key: (order.index(key[0]), key[1])):
            self.queue.append(batches[key])
        return sends + receives

    def _send(self, send: Send) -> _Message:
        item = send.item
        held = item if item in self.blocks else item._replace(part=())
        if item.sum not in self.sums if item.kind.is_result else held not in self.blocks:
            raise self.error(f"sends {item}, which it does not have")
        if not item.kind.is_result:
            self.unused.discard(item)
            return _Message(send, self.step)
        if item.kind is not item.sum.kind and _adds_twice(item.sum, self.sums[item.sum]):
            raise self.error(f"sends as {item} a sum of several tiles")
        return _Message(send, self.step, self.sums.pop(item.sum))

    @property
    def landing(self) -> list[_Message]:
        """What has to be through before the step can end."""
        return [m for m in self.flying if m.transfer.lands == self.step]

    def land(self) -> None:
        landing = self.landing
        self.flying = [m for m in self.flying if m.transfer.lands != self.step]
        for message in landing:
            assert message.other_end
            if isinstance(message.transfer, Receive):
                self._take(message.transfer, message.other_end)

    def _take(self, receive: Receive, sent: _Message) -> None:
        item, arrived = receive.item, sent.transfer.item
        if arrived != item:
            raise self.error(f"expects {item} from rank {receive.peer}, gets {arrived}")
        if not item.kind.is_result:
            if item in self.unused:
                raise self.error(f"gets {item} twice")
            self.unused.add(item)
            self.blocks.add(item)
            return
        at_home = item.owner == self.plan.rank
        item = item._replace(part=()) if at_home else item
        self.sums[item.sum].update(sent.payload)

    def __str__(self) -> str:
        waiting = ", ".join(str(message) for message in self.landing if not message.through)
        return f"rank {self.plan.rank}, step {self.step} waits to {waiting}"

    def error(self, what: str) -> PlanError:
        return PlanError(f"rank {self.plan.rank}, step {self.step}: {what}")


def _adds_twice(item: Item, tiles: _Sum) -> bool:
    """Whether several tiles added to a row of an item."""
    block = Kind.KV if item.kind is Kind.D_KV else Kind.QUERY
    rows = [tile.rows_of(block) for tile in tiles.elements()]
    return sum(r.length for r in rows) != sum(r.length for r in union_of(rows))


@dataclass
class _Machine:
    ranks: list[_Rank]
    # By source, target and channel: the messages of either end whose other end is still missing.
    unmatched: dict[tuple[int, int, Channel], list[_Message]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def advance(self, rank: _Rank) -> bool:
        """Post the rank's step, or finish it if all it waits for is there; say if it moved."""
        if rank.done:
            return False
        if not rank.posted:
            for message in rank.post():
                self._match(rank.plan.rank, message)
            rank.compute()
            rank.posted = True
            return True
        if not all(message.through for message in rank.landing):
            return False
        rank.land()
        rank.step, rank.posted = rank.step + 1, False
        return True

    def _match(self, rank: int, message: _Message) -> None:
        transfer = message.transfer
        ends = (rank, transfer.peer) if isinstance(transfer, Send) else (transfer.peer, rank)
        waiting = self.unmatched[*ends, transfer.channel]
        if waiting and type(waiting[0].transfer) is not type(transfer):
            message.other_end = waiting.pop(0)
            message.other_end.other_end = message
        else:
            waiting.append(message)

    def move_queues(self) -> None:
        """Let every rank work on its first batch that is not through yet."""
        moved = True
        while moved:
            moved = False
            for batch in self._heads():
                moved |= not batch[0].active
                for message in batch:
                    message.active = True

    def _heads(self) -> Iterator[list[_Message]]:
        for rank in self.ranks:
            while rank.queue and all(message.through for message in rank.queue[0]):
                rank.queue.pop(0)
            yield from rank.queue[:1]

    def check_nothing_left(self) -> None:
        for rank in self.ranks:
            for message in rank.flying:
                raise PlanError(
                    f"rank {rank.plan.rank}, step {message.posted}: is to {message} by step "
                    f"{message.transfer.lands}, at whose end it does not wait any more"
                )


def _check_tiles(plans: Sequence[Plan], pairs: int | None) -> None:
    computed: dict[Tile, str] = {}
    for plan in plans:
        for number, step in enumerate(plan.steps):
            where = f"rank {plan.rank}, step {number}"
            for tile in tiles_of(step):
                if tile in computed:
                    raise PlanError(f"{where}: computes {tile}, as does {computed[tile]}")
                computed[tile] = where
    found = sum(tile.pairs for tile in computed)
    if pairs is not None and found != pairs:
        raise PlanError(f"the tiles have {found} pairs of tokens, the mask {pairs}")


def _check_results(ranks: Sequence[_Rank], backward: bool) -> None:
    """Each tile adds to an output or two gradients; all must be at their owners, once."""
    expected: dict[Item, _Sum] = defaultdict(Counter)
    for rank in ranks:
        for item in rank.sums:
            if item.owner != rank.plan.rank:
                raise rank.error(f"still has {item} at the end")
        for tiles in (tiles for step in rank.plan.steps for tiles in step.blocks):
            for item in results_of(tiles, backward):
                expected[item._replace(part=())].update(tiles_of(tiles))
    found = {item: total for rank in ranks for item, total in rank.sums.items()}
    for item, total in expected.items():
        there = found.get(item, Counter())
        for tile in (total - there) + (there - total):
            raise PlanError(f"{item} ends with the part of {tile} in it {there[tile]} times")
