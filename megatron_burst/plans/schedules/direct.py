"""Plans without a ring: what another rank needs of a shard goes straight to it, and nothing else.

Under a window, short documents or a sparse block mask a rank needs few rows of few others; a ring
would carry whole shards past ranks that have no use for them. In step d a rank computes with the
rows of the rank d places before it in the grid's order; they have been on their way since the
start, all in one message. Gradients return straight to their owners. A rank's own tile is computed
in part first and in part last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_burst.plans.schedules.plan import Channel, Hop, Item, Kind, Part
from megatron_burst.plans.schedules.schedule import Loads, Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, stations
from megatron_burst.plans.visibility.band import Ints
from megatron_burst.plans.visibility.interval import union_of


@dataclass(frozen=True, slots=True)
class Direct(Schedule):
    """What the plans of all ranks have in common; the counterpart of `rings.Ring`.

    For masks that are sparse: under others its bytes are counted as if blocks went whole. Messages
    pass between any two ranks, and a rank holds all that it receives at once, so that it pays only
    for half of the bytes.
    """

    worth = worth_in_all = 0.5
    tiling: Tiling
    grid: Grid
    sent: Kind = Kind.KV
    """KV, or QUERY for a backward in which K and V stay."""

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.sent} direct exchange"

    def memory(self, sizes: Mapping[Kind, int], *, backward: bool) -> int:
        """Return the bytes that a rank has of others' blocks and results, at the most."""
        rows = self.tiling.needs.rows[self.sent] * (1 - np.eye(self.grid.ranks, dtype=np.int64))
        local, received = self.tiling.local_tokens, rows.sum(axis=0) * sizes[self.sent]
        # Of own rows a part of a block is copied to be sent, and gone before results come; of
        # queries, that go with what belongs to them, the whole is, too, once.
        copied = (rows * (rows < local)).sum(axis=1)
        if self.sent is Kind.QUERY:
            copied += local * (rows == local).any(axis=1)
        most = (received + copied * sizes[self.sent]).max()
        if backward:  # results of what was received, and those that come home
            results = rows * self.result_sizes(sizes)
            most = max(most, (received + results.sum(axis=0) + results.sum(axis=1)).max())
        return int(most) // local

    def messages(self, *, backward: bool) -> "tuple[_DirectMessages, ...]":
        """Return all messages of a forward or a backward."""
        return (self.reads(), self.gradients()) if backward else (self.reads(),)

    def reads(self) -> "_DirectMessages":
        """Return the messages with blocks: all are posted at once."""
        return _DirectMessages(self, self.sent)

    def gradients(self) -> "_DirectMessages":
        """Return the messages with gradients: all have landed at the end."""
        return _DirectMessages(self, self.sent.gradient)

    def result_sizes(self, sizes: Mapping[Kind, int]) -> Ints:
        """Return the bytes of a whole gradient as each rank returns that of another's block."""
        gradient, is_once = self.sent.gradient, self.tiling.needs.once[self.sent]
        return np.where(is_once, sizes[gradient.partial], sizes[gradient])

    def part(self, kind: Kind, owner: int, user: int) -> Part:
        """Return the rows of a block that a rank needs, one message; () is all, or none."""
        if self.tiling.needs.rows[kind][owner, user] in (0, self.tiling.local_tokens):
            return ()
        return tuple(union_of(self.tiling.of_block(kind, owner, user).rows_of(kind)))


@dataclass(frozen=True, slots=True)
class _DirectMessages:
    """The messages of all ranks with what others need of their blocks, or with its gradients."""

    schedule: Direct
    kind: Kind

    def hops(self, rank: int | None = None) -> list[Hop]:
        """Return all messages, or those that `rank` sends or receives, in the same order."""
        distances, owners, users = self._needed()
        ours = np.full(len(owners), True) if rank is None else (owners == rank) | (users == rank)
        messages = np.stack([distances, owners, users])[:, ours]
        ordered = messages[:, np.lexsort((messages[2], messages[0]))].T.tolist()
        return [self._hop(*needed) for needed in ordered]

    def loads(self, sizes: Mapping[Kind, int], local_tokens: int, *, summed: bool = False) -> Loads:
        """Return all of them, [distance - 1, owner]."""
        users = stations(self.schedule.grid)[1:]
        owners = np.broadcast_to(np.arange(users.shape[1]), users.shape)
        rows = self.schedule.tiling.needs.rows[self.schedule.sent][owners, users]
        distances = np.arange(1, len(users) + 1)
        if self.kind.is_result:
            payload = self.schedule.result_sizes(sizes)[owners, users] * rows // local_tokens
            last = np.full(len(users), len(users) + 1)
            return Loads(users, owners, payload, distances + 1, last)
        payload = sizes[self.kind] * rows // local_tokens
        return Loads(owners, users, payload, 0 * distances, distances - 1)

    def _needed(self) -> tuple[Ints, ...]:
        """Who needs something of whom: distances, owners, users."""
        ranks = stations(self.schedule.grid)
        rows = self.schedule.tiling.needs.rows[self.schedule.sent]
        distances, owners = np.nonzero(rows[np.arange(len(ranks)), ranks])
        away = distances > 0
        return distances[away], owners[away], ranks[distances[away], owners[away]]

    def _hop(self, distance: int, owner: int, user: int) -> Hop:
        grid = self.schedule.grid
        item = Item(self.kind, owner, self.schedule.part(self.schedule.sent, owner, user))
        if self.kind.is_result:
            if self.schedule.tiling.needs.once[self.schedule.sent][owner, user]:
                item = item._replace(kind=self.kind.partial)
            ways = Channel.GRADIENT_WITHIN, Channel.GRADIENT_BETWEEN, Channel.GRADIENT_DIRECT
            return Hop(item, user, owner, ways[self._way(owner, user)], distance + 1, grid.ranks)
        ways = Channel.READ_WITHIN, Channel.READ_BETWEEN, Channel.READ_DIRECT
        return Hop(item, owner, user, ways[self._way(owner, user)], 0, distance - 1)

    def _way(self, one: int, other: int) -> int:
        """Return 0 within a row of the grid, 1 within a column, 2 from corner to corner."""
        grid = self.schedule.grid
        (node, place), (other_node, other_place) = map(grid.coordinates, (one, other))
        return 0 if node == other_node else 1 if place == other_place else 2
