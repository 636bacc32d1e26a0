"""Plans without a ring: what another rank needs of a shard goes straight to it, and nothing else.

Under a window, short documents or a sparse block mask a rank needs few rows of few others; a ring
would carry whole shards past ranks that have no use for them. In step d a rank computes with the
rows of the rank d places before it in the grid's order; they have been on their way since the
start. Gradients return straight to their owners. A rank's own tile is computed in part first and in
part last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_burst.plans.layout import Interval, joined
from megatron_burst.plans.plan import Channel, Hop, Item, Kind, Tile
from megatron_burst.plans.schedule import Schedule
from megatron_burst.plans.tiles import Tiling, half_and_quarters
from megatron_burst.plans.topology import Grid


@dataclass(frozen=True, slots=True)
class Direct(Schedule):
    """What the plans of all ranks have in common; the counterpart of `rings.Ring`."""

    tiling: Tiling
    grid: Grid
    sent: Kind = Kind.KV
    """KV, or QUERY for a backward in which K and V stay."""

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.sent} direct exchange"

    def tiles(self, rank: int, *, backward: bool) -> dict[int, Sequence[Tile]]:
        """Return what a rank computes, by step."""
        tiles: dict[int, Sequence[Tile]] = {0: self.tiling(rank, rank)}
        if backward:
            tiles[0], first, second = half_and_quarters(tiles[0])
            tiles[self.grid.ranks] = first + second
        for distance, owner in enumerate(self.grid.visits(rank)[1:], start=1):
            parts = self._parts(owner, rank)
            used = self.tiling.of_block(self.sent, owner, rank)
            tiles[distance] = [self._of_part(tile, parts) for tile in used]
        return tiles

    def reads(self) -> list[Hop]:
        """Return the hops of all blocks, in the forward or in the backward."""
        needed = self._needed(Channel.READ_WITHIN, Channel.READ_BETWEEN)
        return [
            Hop(Item(self.sent, owner, part), owner, user, channel, 0, distance - 1)
            for owner, user, distance, channel, part in needed
        ]

    def gradients(self) -> list[Hop]:
        """Return the hops of all gradients of a backward."""
        needed = self._needed(Channel.GRADIENT_WITHIN, Channel.GRADIENT_BETWEEN)
        kind, end = self.sent.gradient, self.grid.ranks
        return [
            Hop(Item(kind, owner, part), user, owner, channel, distance + 1, end)
            for owner, user, distance, channel, part in needed
        ]

    def _needed(
        self, within: Channel, between: Channel
    ) -> Iterator[tuple[int, int, int, Channel, Interval]]:
        """Every part of an owner's rows that a rank needs; how far apart they are, and its way."""
        ranks = range(self.grid.ranks)
        node = {rank: self.grid.coordinates(rank)[0] for rank in ranks}
        visits = {user: self.grid.visits(user) for user in ranks}
        for distance in ranks[1:]:
            for user, owners in visits.items():
                owner = owners[distance]
                channel = within if node[owner] == node[user] else between
                for part in self._parts(owner, user):
                    yield owner, user, distance, channel, part

    def _parts(self, owner: int, user: int) -> list[Interval]:
        """The rows of `owner` that `user` needs, as few intervals."""
        tiles = self.tiling.of_block(self.sent, owner, user)
        return joined([tile.rows_of(self.sent) for tile in tiles])

    def _of_part(self, tile: Tile, parts: Sequence[Interval]) -> Tile:
        rows = tile.rows_of(self.sent)
        part = next(p for p in parts if p.start <= rows.start and rows.stop <= p.stop)
        return tile.reading(self.sent, part)
