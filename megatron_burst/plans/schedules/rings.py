"""Plans of rings: blocks go around the rank grid, gradients return to their owners.

In step p·L + s (pass p, step s of it) rank (node, local) works on the block of (node-p, local-s).
Within a pass a block moves on to the next rank of the node. Each pass starts from the node's rank
of the same local index as the owner, which has sent it the block straight, in the whole pass
before. With one node this is the flat ring. With one rank a node and gradients by the chain, blocks
come from the neighbour, too: ranks drift apart, and messages from several would meet at a NIC.

A gradient that returns by the chain collects one partial sum a rank, a step behind its block. The
owner's node returns it when the first pass is over; of every later node the sum of its pass is sent
to the next node, and the last one to the owner. Returned straight instead, a rank's partial goes to
the rank of the owner's local index in its own node, and the sum of that node straight to the owner.
The owner's own partial stays there; it is computed in parts, the first while the first block is on
its way and the rest while the last gradient is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_burst.plans.schedules.needs import part_of
from megatron_burst.plans.schedules.plan import Channel, Kind, Part, Tiles
from megatron_burst.plans.schedules.route import Leg, Route, Used, used_by_blocks, used_by_results
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling, own_tiles_by_step
from megatron_burst.plans.schedules.topology import Grid, stations
from megatron_burst.plans.visibility.band import Bools, Ints


@dataclass(frozen=True, slots=True)
class Ring(Schedule):
    """What the plans of all ranks have in common.

    Nothing is sent that nobody further on needs: a block stops after the last rank with a tile for
    it, and a gradient starts at the first rank that has something to add. Rows at its ends that no
    other rank needs stay there; to a node go those that its ranks need.
    """

    tiling: Tiling
    grid: Grid
    sent: Kind = Kind.KV
    """KV, or QUERY for a backward in which K and V stay."""
    chained: bool = False
    """Whether gradients return by the chain: rounded at every hop where they travel in 16 bits.

    On nodes of one rank blocks go from neighbour to neighbour, then.
    """
    gather: bool = False
    """Compute only when all blocks have arrived: the all-gather of other frameworks."""

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.sent} ring"

    def memory(self, sizes: Mapping[Kind, int], *, backward: bool) -> int:
        """Return the bytes that a rank has of others' blocks and results, at the most."""
        # Straight between nodes of one rank a part is a step longer on its way.
        flat = 0, 4 + (self.grid.nodes > 2 and not self.chained), 0
        more, parts, sums = (1, 2, 4) if self._two_levels else flat
        most = self.grid.ranks - 1
        at_once = most if self.gather else 0
        held = (at_once or min(2 + more, most)) * sizes[self.sent]
        if backward:
            held += (parts + at_once) * sizes[self.returned] + sums * sizes[self.sent.gradient]
        return held

    def messages(self, *, backward: bool) -> tuple[Route, ...]:
        """Return all messages of a forward or a backward."""
        return (self.reads(), self.gradients()) if backward else (self.reads(),)

    def reads(self) -> Route:
        """Return the way of all blocks: it stops where no later rank needs it."""
        return self._route([*self._block_legs()], used_by_blocks)

    def gradients(self) -> Route:
        """Return the way of all gradients: it begins where the first partial is."""
        legs = self._chain() if self.chained else self._to_owner()
        return self._route([*legs], used_by_results)

    def _route(self, legs: Sequence[Leg], used: Used) -> Route:
        of_all = np.ones((len(legs), self.grid.ranks), bool)
        if not self.tiling.all_is_needed:
            of_all = used(legs, _useful(self.tiling, self.grid, self.sent))
        length = self.grid.ranks_per_node
        return Route(legs, stations(self.grid), of_all, self._parts, length)

    @property
    def _parts(self) -> Ints:
        """[pass, owner, 2]: from the first to the last row that a node needs of a block.

        A chain adds up the gradients of all nodes: what any needs. Without a mask
        beside causality all blocks are whole: a few rows less from the last chunk's owner alone
        would not unload the bottleneck link.
        """
        is_sparse = self.tiling.mask.is_sparse
        if not is_sparse or self.chained or self.grid.nodes == 1:
            return self.tiling.needs.parts[self.sent][None]
        return _parts(self.tiling, self.grid, self.sent)

    @property
    def returned(self) -> Kind:
        """What a rank sends of a gradient behind its block: what it added, or a chain's sum."""
        gradient = self.sent.gradient
        return gradient if self.chained else self.of_one_step(gradient)

    @property
    def _two_levels(self) -> bool:
        return min(self.grid.nodes, self.grid.ranks_per_node) > 1

    @property
    def delay(self) -> int:
        """The first step in which a rank computes: when all blocks are there."""
        return self.grid.ranks - 1 if self.gather else 0

    def has_ends(self, *, backward: bool) -> bool:
        """Whether a rank computes its own tiles in parts, first and last."""
        return backward and self.grid.ranks > 1 and not self.gather

    def spread(self, own: Tiles) -> dict[int, list[Tiles]]:
        """Share a rank's own tiles out to the first step and the last."""
        levels, end = self._two_levels, self.grid.ranks
        return own_tiles_by_step(own, end, two_levels=levels, chained=self.chained)

    def part(self, kind: Kind, owner: int, user: int) -> Part:
        """Return which rows of a block its user has; () is all."""
        parts, (home, _), (node, _) = self._parts, *map(self.grid.coordinates, (owner, user))
        return part_of(parts[(node - home) % self.grid.nodes % len(parts), owner])

    def _block_legs(self) -> Iterator[Leg]:
        """A block's way: from its owner to every node of its column, and around each node.

        Were it passed on from node to node, it would fill a buffer for a whole pass.
        """
        length, sent = self.grid.ranks_per_node, self.sent
        is_passed_on = self.chained and length == 1
        for begin in range(0, self.grid.ranks, length):
            if begin > 0:
                source = begin - 1 if is_passed_on else 0
                yield Leg(sent, source, begin, Channel.READ_BETWEEN, begin - length, begin - 1)
            for t in range(begin + 1, begin + length):
                yield Leg(sent, t - 1, t, Channel.READ_WITHIN, t - 1, t - 1)

    def _chain(self) -> Iterator[Leg]:
        """A gradient's way if every rank adds to what came before."""
        length, ranks, sums = self.grid.ranks_per_node, self.grid.ranks, self.sent.gradient
        last, end = length - 1, ranks + self.delay  # who works on a block last in its node
        for begin in range(0, ranks, length):
            step = begin + self.delay + 1
            for s in range(1 if begin == 0 else 0, last):
                ends = begin + s, begin + s + 1
                yield Leg(sums, *ends, Channel.GRADIENT_WITHIN, step + s, step + s)
            leaves = begin + length + self.delay
            if begin == 0 and length > 1:
                yield Leg(sums, last, 0, Channel.GRADIENT_WITHIN, leaves, leaves)
            elif begin > 0:
                lands = end if begin + length == ranks else leaves + length - 1
                ends = begin + last, (begin + length) % ranks + last
                yield Leg(sums, *ends, Channel.GRADIENT_BETWEEN, leaves, lands)
        if 1 < length < ranks:
            yield Leg(sums, last, 0, Channel.GRADIENT_WITHIN, end + 1, end + 1)

    def _to_owner(self) -> Iterator[Leg]:
        """A gradient's way if each partial is sent as soon as it is there, summed once a node."""
        length, ranks, part = self.grid.ranks_per_node, self.grid.ranks, self.returned
        of_node = self.sent.gradient if length > 1 else part
        tail = 1 if length > 1 else 0  # the sum of a node is complete a hop after its pass
        for begin in range(0, ranks, length):
            for t in range(begin + 1, begin + length):
                step = t + self.delay + 1
                yield Leg(part, t, begin, Channel.GRADIENT_WITHIN, step, step)
            if begin > 0:
                leaves = begin + length + self.delay + tail
                # With no step to spare, a rank that is late would hold up all others.
                lands = min(leaves + max(length - 1, 1), ranks + self.delay + tail)
                yield Leg(of_node, begin, 0, Channel.GRADIENT_BETWEEN, leaves, lands)


@lru_cache(maxsize=2)
def _useful(tiling: Tiling, grid: Grid, kind: Kind) -> Bools:
    """Who of those that a block passes has a use for it: [station, owner]."""
    return tiling.needs.users(kind)[np.arange(grid.ranks), stations(grid)]


@lru_cache(maxsize=2)
def _parts(tiling: Tiling, grid: Grid, kind: Kind) -> Ints:
    """Return the ends of the rows that the node of a pass needs of a block: [pass, owner, 2]."""
    rows, nodes = np.array(grid.rows), np.arange(grid.nodes)[:, None]
    home = np.empty(grid.ranks, np.int64)
    home[rows] = nodes
    return tiling.needs.parts_of(kind, rows)[(home + nodes) % grid.nodes, np.arange(grid.ranks)]
