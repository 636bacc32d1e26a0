"""Plans without a ring: what another rank needs of a shard goes straight to it, and nothing else.

Under a window, short documents or a sparse block mask a rank needs few rows of few others; a ring
would carry whole shards past ranks that have no use for them. In step d a rank computes with the
rows of the rank d places before it in the grid's order; they have been on their way since the
start. Gradients go straight home. A rank's own tile is computed in part first and in part last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Channel, Hop, Item, Kind, Plan, Tile, assemble
from megatron_burst.plans.tiles import Tiling, thirds
from megatron_burst.plans.topology import Grid


@dataclass(frozen=True, slots=True)
class Direct:
    """What the plans of all ranks have in common; the counterpart of `rings.Ring`."""

    tiling: Tiling
    grid: Grid
    travels: Kind = Kind.KV
    """KV, or QUERY for a backward in which K and V stay."""

    def forward(self, rank: int) -> Plan:
        """Return a rank's plan of the forward."""
        return assemble(rank, self.reads(), self.tiles(rank, backward=False))

    def backward(self, rank: int) -> Plan:
        """Return a rank's plan of the backward."""
        hops = [*self.reads(), *self.gradients()]
        return assemble(rank, hops, self.tiles(rank, backward=True))

    def tiles(self, rank: int, *, backward: bool) -> dict[int, Sequence[Tile]]:
        """Return what a rank computes, by step."""
        tiles = self._tiles_by_step(rank)
        if backward:
            parts = [thirds(tile) for tile in tiles[0]]
            tiles[0] = [t for half, _, _ in parts for t in half]
            tiles[self._end] = [t for _, first, second in parts for t in (*first, *second)]
        return tiles

    def reads(self) -> list[Hop]:
        """Return the hops of all blocks, in the forward or in the backward."""
        return [
            Hop(Item(self.travels, owner, part), owner, user, channel, 0, distance - 1)
            for owner, user, distance in self._pairs()
            for channel in [self._channel(owner, user, Channel.READ_WITHIN)]
            for part in self._parts(user, owner)
        ]

    def gradients(self) -> list[Hop]:
        """Return the hops of all gradients of a backward."""
        kind = self.travels.gradient
        return [
            Hop(Item(kind, owner, part), user, owner, channel, distance + 1, self._end)
            for owner, user, distance in self._pairs()
            for channel in [self._channel(owner, user, Channel.GRADIENT_WITHIN)]
            for part in self._parts(user, owner)
        ]

    @property
    def _end(self) -> int:
        return self.grid.ranks

    def _pairs(self) -> Iterator[tuple[int, int, int]]:
        """Every owner with every rank that needs something of it, and its distance from that."""
        visits = {user: self.grid.visits(user) for user in range(self.grid.ranks)}
        for distance in range(1, self.grid.ranks):
            for user, owners in visits.items():
                if self._tiles(user, owners[distance]):
                    yield owners[distance], user, distance

    def _channel(self, owner: int, user: int, within: Channel) -> Channel:
        between = {
            Channel.READ_WITHIN: Channel.READ_BETWEEN,
            Channel.GRADIENT_WITHIN: Channel.GRADIENT_BETWEEN,
        }
        nodes = {self.grid.place(rank)[0] for rank in (owner, user)}
        return within if len(nodes) == 1 else between[within]

    def _tiles(self, rank: int, owner: int) -> tuple[Tile, ...]:
        """What `rank` computes with the block of `owner`."""
        pair = (rank, owner) if self.travels is Kind.KV else (owner, rank)
        return self.tiling(*pair)

    def _rows(self, tile: Tile) -> Interval:
        """The rows that a tile needs of what travels."""
        return tile.key_rows if self.travels is Kind.KV else tile.query_rows

    def _parts(self, user: int, owner: int) -> list[Interval]:
        """The rows of `owner` that `user` needs, as few intervals."""
        return joined([self._rows(tile) for tile in self._tiles(user, owner)])

    def _tiles_by_step(self, rank: int) -> dict[int, Sequence[Tile]]:
        tiles: dict[int, Sequence[Tile]] = {0: self._tiles(rank, rank)}
        for distance, owner in enumerate(self.grid.visits(rank)[1:], start=1):
            parts = self._parts(rank, owner)
            tiles[distance] = [self._of_part(t, parts) for t in self._tiles(rank, owner)]
        return tiles

    def _of_part(self, tile: Tile, parts: Sequence[Interval]) -> Tile:
        """Say which part of what travels the tile reads."""
        rows = self._rows(tile)
        part = next(p for p in parts if p.start <= rows.start and rows.stop <= p.stop)
        return tile.reading(self.travels, part)


def joined(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the union of the intervals as disjoint ones that do not touch, in order."""
    union: list[Interval] = []
    for interval in sorted(intervals):
        if union and interval.start <= union[-1].stop:
            last = union.pop()
            interval = Interval(last.start, max(last.stop, interval.stop))
        union.append(interval)
    return union
