"""Plans of rings: blocks go around the rank grid, gradients return to their owners.

In step p·L + s (pass p, step s of it) rank (node, local) works on the block of (node-p, local-s).
Within a pass a block moves on to the next rank of the node. Between passes it starts again from the
node's rank of the same local index as its owner, to which it has been on its way for a whole pass.
With one node this is the flat ring.

A gradient that returns by the chain collects one partial sum a rank, a step behind its block. The
owner's node returns it when the first pass is over; of every later node the sum of its pass is sent
to the next node, and the last one to the owner. Returned straight instead, a rank's partial goes to
the rank of the owner's local index in its own node, and the sum of that node straight to the owner.
The owner's own partial stays there; it is computed in parts, the first while the first block is on
its way and the rest while the last gradient is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_burst.config import GradientReturn
from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Channel, Hop, Item, Kind, Tile
from megatron_burst.plans.schedule import Schedule
from megatron_burst.plans.tiles import Tiling, half_and_quarters
from megatron_burst.plans.topology import Grid

type _Hops = Iterator[Hop]


@dataclass(frozen=True, slots=True)
class Ring(Schedule):
    """What the plans of all ranks have in common.

    Nothing is sent that nobody further on needs: a block stops after the last rank with a tile for
    it, and a gradient starts at the first rank that has something to add. Rows at its ends that no
    other rank needs stay there.
    """

    tiling: Tiling
    grid: Grid
    sent: Kind = Kind.KV
    """KV, or QUERY for a backward in which K and V stay."""
    gradient_return: GradientReturn = GradientReturn.CHAIN
    """CHAIN or HOME."""
    gather: bool = False
    """Compute only when all blocks have arrived: the all-gather of other frameworks."""

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.sent} ring"

    def tiles(self, rank: int, *, backward: bool) -> dict[int, Sequence[Tile]]:
        """Return what a rank computes, by step."""
        visits = [self._tiles(rank, owner) for owner in self.grid.visits(rank)]
        if self.gather:
            return {self._delay: [tile for visit in visits for tile in visit]}
        tiles: dict[int, Sequence[Tile]] = dict(enumerate(visits))
        if backward and len(visits) > 1:
            tiles |= self._own_tiles_by_step(visits[0])
        return tiles

    def reads(self) -> list[Hop]:
        """Return the hops of all blocks, in the forward or in the backward."""
        owners = range(self.grid.ranks)
        return [hop for o in owners for hop in _needed([*self._reads(o)], self._users(o))]

    def gradients(self) -> list[Hop]:
        """Return the hops of all gradients of a backward."""
        chained, owners = self.gradient_return is GradientReturn.CHAIN, range(self.grid.ranks)
        way = self._chain if chained else self._to_owner
        return [hop for o in owners for hop in _begun(way(o), self._users(o))]

    @property
    def _delay(self) -> int:
        """How many steps later than in a ring a block is worked on."""
        return self.grid.ranks - 1 if self.gather else 0

    def _tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        tiles = self.tiling.of_block(self.sent, owner, rank)
        if rank == owner or (part := self._part(owner)) is None:
            return tiles
        return tuple(tile.reading(self.sent, part) for tile in tiles)

    def _part(self, owner: int) -> Interval | None:
        """The rows from the first to the last that another rank needs of a block; None for all.

        Without a mask beside causality all blocks are whole: a few rows less from the last chunk's
        owner alone would not unload the bottleneck link.
        """
        if not self.tiling.mask.is_sparse:
            return None
        needed = [
            tile.rows_of(self.sent)
            for user in self._users(owner)
            for tile in self.tiling.of_block(self.sent, owner, user)
        ]
        if not needed:
            return None
        part = Interval(min(rows.start for rows in needed), max(rows.stop for rows in needed))
        return None if part.length == self.tiling.local_tokens else part

    def _users(self, owner: int) -> set[int]:
        others = (rank for rank in range(self.grid.ranks) if rank != owner)
        return {user for user in others if self.tiling.of_block(self.sent, owner, user)}

    def _own_tiles_by_step(self, own: Sequence[Tile]) -> dict[int, Sequence[Tile]]:
        """Spread the own tiles over the first step and the ends, under the last gradients.

        A double ring ends with a message between nodes and one within the node: the half goes to
        the first of the two, a quarter to the other and to the start, whose message is within.
        """
        half, first, second = half_and_quarters(own)
        end = self.grid.ranks
        if min(self.grid.nodes, self.grid.ranks_per_node) == 1:
            return {0: half, end: first + second}
        if self.gradient_return is GradientReturn.CHAIN:
            return {0: first, end: half, end + 1: second}
        return {0: first, end: second, end + 1: half}

    def _reads(self, owner: int) -> _Hops:
        """The block's way: along its owner's column from node to node, and around each node."""
        grid, item = self.grid, Item(self.sent, owner, self._part(owner))
        node, local = grid.coordinates(owner)
        length = grid.ranks_per_node
        for p in range(grid.nodes):
            if p > 0:
                ends = grid.at(node + p - 1, local), grid.at(node + p, local)
                yield Hop(item, *ends, Channel.READ_BETWEEN, (p - 1) * length, p * length - 1)
            for s in range(length - 1):
                ends = grid.at(node + p, local + s), grid.at(node + p, local + s + 1)
                yield Hop(item, *ends, Channel.READ_WITHIN, p * length + s, p * length + s)

    def _chain(self, owner: int) -> _Hops:
        """The gradient's way if every rank adds to what came before."""
        grid, item = self.grid, Item(self.sent.gradient, owner, self._part(owner))
        node, local = grid.coordinates(owner)
        length, end = grid.ranks_per_node, grid.ranks + self._delay
        for p in range(grid.nodes):
            begin = p * length + self._delay
            for s in range(1 if p == 0 else 0, length - 1):
                ends = grid.at(node + p, local + s), grid.at(node + p, local + s + 1)
                yield Hop(item, *ends, Channel.GRADIENT_WITHIN, begin + s + 1, begin + s + 1)
            last = local - 1  # who works on this block last in each node
            if p == 0 and length > 1:
                ends = grid.at(node, last), owner
                yield Hop(item, *ends, Channel.GRADIENT_WITHIN, begin + length, begin + length)
            elif p > 0:
                ends = grid.at(node + p, last), grid.at(node + p + 1, last)
                leaves = begin + length
                lands = end if p == grid.nodes - 1 else leaves + length - 1
                yield Hop(item, *ends, Channel.GRADIENT_BETWEEN, leaves, lands)
        if grid.nodes > 1 and length > 1:
            ends = grid.at(node, local - 1), owner
            yield Hop(item, *ends, Channel.GRADIENT_WITHIN, end + 1, end + 1)

    def _to_owner(self, owner: int) -> _Hops:
        """The gradient's way if each partial is sent as soon as it is there, summed once a node."""
        grid, item = self.grid, Item(self.sent.gradient, owner, self._part(owner))
        node, local = grid.coordinates(owner)
        length = grid.ranks_per_node
        tail = 1 if length > 1 else 0  # the sum of a node is complete a hop after its pass
        for p in range(grid.nodes):
            begin = p * length + self._delay
            gathers = grid.at(node + p, local)
            for s in range(1, length):
                ends = grid.at(node + p, local + s), gathers
                yield Hop(item, *ends, Channel.GRADIENT_WITHIN, begin + s + 1, begin + s + 1)
            if p > 0:
                leaves = begin + length + tail
                lands = leaves if p == grid.nodes - 1 else leaves + length - 1
                yield Hop(item, gathers, owner, Channel.GRADIENT_BETWEEN, leaves, lands)


def _needed(hops: Sequence[Hop], users: set[int]) -> Iterator[Hop]:
    """Keep those hops of a block, given in the order of its way, that lead on to a user."""
    needed, kept = set(users), []
    for hop in reversed(hops):
        if hop.target in needed:
            needed.add(hop.source)
            kept.append(hop)
    return reversed(kept)


def _begun(hops: Iterator[Hop], users: set[int]) -> Iterator[Hop]:
    """Keep those hops of a gradient, given in the order of its way, that carry something."""
    holding = set(users)
    for hop in hops:
        if hop.source in holding:
            holding.remove(hop.source)
            holding.add(hop.target)
            yield hop
