"""What makes the plans of all ranks of an attention call."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from megatron_burst.plans.schedules.plan import Channel, Hop, Kind, Part, Plan, Tiles
from megatron_burst.plans.schedules.tiles import Tiling, own_tiles_by_step
from megatron_burst.plans.schedules.topology import Grid, visits
from megatron_burst.plans.schedules.work import Work, work_of_pairs
from megatron_burst.plans.visibility.band import Ints


class Loads(NamedTuple):
    """Who sends how much to whom, many messages at a time: arrays [leg, message], in their order.

    In a leg no rank sends twice or receives twice, and all are posted and land together.
    """

    sources: Ints
    targets: Ints
    sizes: Ints  # bytes; 0 where nothing goes
    leaves: Ints  # of each leg, the step that posts it
    lands: Ints


class Messages(Protocol):
    """The messages of all ranks that move the blocks, or the gradients, of one kind."""

    def hops(self, rank: int | None = None) -> list[Hop]:
        """Return all messages, or those that `rank` sends or receives, in the same order."""

    def loads(self, sizes: Mapping[Kind, int], local_tokens: int, *, summed: bool = False) -> Loads:
        """Return all of them; `sizes` are the bytes of a whole item, `local_tokens` its rows.

        Where the steps do not matter, those between the same ranks may be `summed`.
        """


class Schedule(ABC):
    """The messages of all ranks and the tiles of each; a new way to send is a class of these.

    It is a value: equal schedules make equal plans, on every rank.
    """

    __slots__ = ()

    tiling: Tiling
    """Who computes what."""
    grid: Grid
    sent: Kind
    """What goes around, or straight to whom needs it: KV or QUERY."""

    worth: ClassVar[float] = 1.0
    """Up to which share of a ring's bytes on the bottleneck link it is worth its other costs."""
    worth_in_all: ClassVar[float] = 0.0
    """Up to which share of all that a rank sends in a ring, with no more on the bottleneck link."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in the log."""

    @property
    def pairs(self) -> Ints:
        """How many pairs of tokens each rank computes: all of what does not move."""
        return self.tiling.needs.pairs.sum(axis=1 if self.sent is Kind.KV else 0)

    @abstractmethod
    def messages(self, *, backward: bool) -> tuple[Messages, ...]:
        """Return all messages of a forward or a backward: blocks, then results."""

    def hops(self, rank: int | None = None, *, backward: bool) -> list[Hop]:
        """Return all of them, or those that `rank` sends or receives, each on its communicator."""
        hops = [hop for each in self.messages(backward=backward) for hop in each.hops(rank)]
        return [
            hop._replace(channel=Channel.READ_ACROSS)
            if hop.channel is Channel.READ_WITHIN and self.grid.after(hop.source) != hop.target
            else hop
            for hop in hops
        ]

    @abstractmethod
    def memory(self, sizes: Mapping[Kind, int], *, backward: bool) -> int:
        """Return the bytes that a rank has of others' blocks and results, at the most.

        The same on every rank. `sizes` are the bytes of a whole item of each kind.
        """

    def of_one_step(self, result: Kind) -> Kind:
        """Return the kind of what a rank adds to a result in a step: no sum if each row once."""
        return result.partial if self.tiling.needs.once[self.sent].all() else result

    def meetings(self, ranks: Sequence[int]) -> tuple[Ints, Ints]:
        """Return whose block of what is sent meets whose of the other kind: both [step, rank].

        Here a rank's own stays, and those of the others come in the order of the grid.
        """
        owners = visits(self.grid, ranks)
        return owners, np.broadcast_to(ranks, owners.shape)

    @abstractmethod
    def part(self, kind: Kind, owner: int, user: int) -> Part:
        """Return which rows of a block that is sent its user has; () is all."""

    @property
    def delay(self) -> int:
        """The first step in which a rank computes."""
        return 0

    def has_ends(self, *, backward: bool) -> bool:
        """Whether a rank computes its own tiles in parts, first and last; see `spread`."""
        return self.sent.result(backward=backward) is not None

    def spread(self, own: Tiles) -> dict[int, list[Tiles]]:
        """Share a rank's own tiles out to the first step and those under the last results."""
        return own_tiles_by_step(own, self.grid.ranks, two_levels=False)

    def tiles(self, rank: int, *, backward: bool) -> dict[int, list[Tiles]]:
        """Return what a rank computes, by step."""
        tiles = defaultdict[int, list[Tiles]](list)
        tiles[self.delay] = [self.tiling(rank, rank)]
        rows, is_sparse = self.tiling.needs.rows[self.sent], self.tiling.mask.is_sparse
        met = (whose[1:, 0].tolist() for whose in self.meetings([rank]))
        for step, (owner, guest) in enumerate(zip(*met, strict=True), start=1):
            if rows[owner, guest]:
                found = self.tiling.of_block(self.sent, owner, guest)
                for kind, whose in ((self.sent, owner), (self.sent.other, guest)):
                    # Without a mask beside causality blocks come whole.
                    if is_sparse and whose != rank and (part := self.part(kind, whose, rank)):
                        found = found.reading(kind, part)
                tiles[max(step, self.delay)].append(found)
        return tiles | self.spread(tiles[0][0]) if self.has_ends(backward=backward) else tiles

    def work(self, *, backward: bool) -> Work:
        """Count what all ranks compute: once a kind of pairs of ranks."""
        owners, guests = self.meetings(range(self.grid.ranks))
        pairs = (guests, owners) if self.sent is Kind.KV else (owners, guests)
        spread = self.spread if self.has_ends(backward=backward) else None
        work = work_of_pairs(self.tiling, *pairs, spread)
        return work.all_at(self.delay) if self.delay else work

    @property
    def imbalance(self) -> float:
        """Max / mean over the ranks of the pairs that they compute; 1.0 is perfect."""
        return float(self.pairs.max() / self.pairs.mean()) if self.pairs.any() else 1.0

    def forward(self, rank: int) -> Plan:
        """Return a rank's plan of the forward."""
        return self._plan(rank, backward=False)

    def backward(self, rank: int) -> Plan:
        """Return a rank's plan of the backward.

        The gradient of what is sent returns to its owner; that of what stays is summed in place.
        """
        return self._plan(rank, backward=True)

    def _plan(self, rank: int, *, backward: bool) -> Plan:
        hops, tiles = self.hops(rank, backward=backward), self.tiles(rank, backward=backward)
        return Plan.of(rank, hops, tiles)
