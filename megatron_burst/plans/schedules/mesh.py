"""Plans on two dimensions: blocks of queries and of keys travel, and meet where both are due.

Take M = H x V nodes as a table, H nodes in a column and V in a row. A node computes the queries of
its row against the keys of its column (or the keys of its row against the queries of its column):
every pair once, and by a balanced layout every node as much. So blocks of one kind come from H - 1
nodes and of the other kind from V - 1, where a ring over the nodes brings those of M - 1:

    forward   (H - 1)·(k + v) + (V - 1)·(q + out + lse)
    backward  (H - 1)·(k + v + dk + dv) + (V - 1)·(q + dO + lse + delta + dq)

Of the kind that is sent around, a rank keeps the blocks of its own place in the H nodes of its
column; a pass takes those of one node around its ranks, step by step. The other kind visits: a
block comes straight from the rank of the same place on another node, stays for H passes, and its
result goes straight home when they are over. The first pass is of a node's own blocks, the last
ones are of the rank's own block of the visiting kind, which needs no way home. Results of what is
sent around are added up at the rank that keeps the block; the sum goes home after its last pass.

Without nodes, or with one rank on each, every rank is a node here. After Mesh-Attention (arXiv
2512.20968), whose tiles are those of a flat mesh. It holds more blocks than a ring, and
merges partial outputs at the visited rank and again at their owner; so it has to save a tenth of
the bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.needs import part_of
from megatron_burst.plans.schedules.plan import Channel, Kind, Part, Tiles
from megatron_burst.plans.schedules.route import Leg, Route, Used, used_by_blocks, used_by_results
from megatron_burst.plans.schedules.schedule import Messages, Schedule
from megatron_burst.plans.schedules.tiles import Tiling, own_tiles_by_step
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.band import Bools, Ints


@dataclass(frozen=True, slots=True)
class Mesh(Schedule):
    """What the plans of all ranks have in common; the counterpart of `rings.Ring`."""

    worth = 0.9
    tiling: Tiling
    grid: Grid
    held: int
    """H, of how many nodes a rank keeps a block of the kind that is sent around."""
    sent: Kind = Kind.KV
    """KV or QUERY: what is sent around; the other kind visits."""

    @property
    def name(self) -> str:
        """What it is called in the log."""
        return f"{self.held} x {self.table.visitors} {self.sent} mesh"

    @property
    def pairs(self) -> Ints:
        """How many pairs of tokens each rank computes."""
        return _pairs(self)

    def memory(self, sizes: Mapping[Kind, int], *, backward: bool) -> int:
        """Return the bytes that a rank has of others' blocks and results, at the most."""
        table, around, visiting = self.table, self.sent, self.sent.other
        passing = min(2, table.locals - 1)
        held = (table.held - 1 + passing) * sizes[around]
        held += min(2, table.visitors - 1) * sizes[visiting]
        if result := visiting.result(backward=backward):
            held += 3 * sizes[result]
        if result := around.result(backward=backward):
            held += (table.held + (2 if passing else 1)) * sizes[result]
            held += (2 if passing else 0) * sizes[self.of_one_step(result)]
        return held

    def sends(self, sizes: Mapping[Kind, int], *, backward: bool) -> tuple[int, int]:
        """Return what a rank sends to other nodes, and within its own, if all is needed whole."""

        def moved(kind: Kind, made: Kind | None) -> int:
            return sizes[kind] + (sizes[made] if made else 0)

        table, around, visiting = self.table, self.sent, self.sent.other
        kept, visits = (kind.result(backward=backward) for kind in (around, visiting))
        away = (table.held - 1) * moved(around, kept)
        away += (table.visitors - 1) * moved(visiting, visits)
        within = moved(around, kept and self.of_one_step(kept))
        return away, len(table.passes) * (table.locals - 1) * within

    def messages(self, *, backward: bool) -> tuple[Messages, ...]:
        """Return all messages of a forward or a backward."""
        around, visiting = self.sent, self.sent.other
        routes = [
            self._around([*self._fetches()], used_by_blocks),
            self._visits([*self._arrivals()], used_by_blocks),
        ]
        if result := visiting.result(backward=backward):
            routes.append(self._visits([*self._departures(result)], used_by_results))
        if result := around.result(backward=backward):
            routes.append(self._around([*self._returns(result)], used_by_results))
        return tuple(routes)

    def meetings(self, ranks: Sequence[int]) -> tuple[Ints, Ints]:
        """Return whose block of what is sent meets whose of what visits: both [step, rank]."""
        steps = [*product(self.table.passes, range(self.table.locals))]
        owners = self.table.away([(-node, 0, -step) for (_, node), step in steps], ranks)
        return owners, self.table.away([(0, -visitor, 0) for (visitor, _), _ in steps], ranks)

    def spread(self, own: Tiles) -> dict[int, list[Tiles]]:
        """Share a rank's own tiles out to the first step and those under the last results."""
        return own_tiles_by_step(own, self.grid.ranks, two_levels=self.table.locals > 1)

    def part(self, kind: Kind, owner: int, user: int) -> Part:
        """Return which rows of a block its users have; () is all."""
        return part_of(self.tiling.needs.parts[kind][owner])

    @property
    def table(self) -> "_Table":
        """The ranks at their places."""
        return _table(self.grid, self.held)

    @property
    def needed(self) -> Bools:
        """Which blocks of the two kinds meet, but at their owner: [visiting owner, sent owner]."""
        return self.tiling.needs.users(self.sent.other)

    def _around(self, legs: Sequence[Leg], used: Used) -> Route:
        """The way of what is sent around: station p·L + s is where it is in step s of pass p."""
        return self._route(self.sent, legs, used, _around(self), _useful_around)

    def _visits(self, legs: Sequence[Leg], used: Used) -> Route:
        """The way of what visits: station u is u nodes on in the owner's row."""
        stations = self.table.away([(0, visitor, 0) for visitor in range(self.table.visitors)])
        return self._route(self.sent.other, legs, used, stations, _useful_visits)

    def _route(
        self,
        kind: Kind,
        legs: Sequence[Leg],
        used: Used,
        stations: Ints,
        useful: "Callable[[Mesh], Bools]",
    ) -> Route:
        of_all = np.ones((len(legs), self.grid.ranks), bool)
        if not self.tiling.all_is_needed:
            of_all = used(legs, useful(self))
        return Route(legs, stations, of_all, self.tiling.needs.parts[kind][None])

    def _channels(self, within: Channel, between: Channel) -> tuple[Channel, Channel]:
        return within, between if self.grid.nodes > 1 else within

    def _fetches(self) -> Iterator[Leg]:
        """A block goes to its keepers, a pass ahead of its use, and in each pass around a node."""
        table, length = self.table, self.table.locals
        within, between = self._channels(Channel.READ_WITHIN, Channel.READ_BETWEEN)
        for number, (_, node) in enumerate(table.passes):
            keeper, begin = table.keeper(node), number * length
            if keeper == begin > 0:
                yield Leg(self.sent, 0, keeper, between, begin - length, begin - 1)
            for t in range(begin + 1, begin + length):
                source = keeper if t == begin + 1 else t - 1
                yield Leg(self.sent, source, t, within, t - 1, t - 1)

    def _returns(self, result: Kind) -> Iterator[Leg]:
        """A result goes to the block's keeper in the node, and the sum home after its last pass."""
        table, length = self.table, self.table.locals
        part = self.of_one_step(result)
        within, between = self._channels(Channel.GRADIENT_WITHIN, Channel.GRADIENT_BETWEEN)
        for number, (visitor, node) in enumerate(table.passes):
            keeper, begin, end = table.keeper(node), number * length, (number + 1) * length
            for t in range(begin + 1, end):
                yield Leg(part, t, keeper, within, t + 1, t + 1)
            if node and not visitor:
                # The sum is complete a hop later.
                leaves = end - 1 + (1 if length == 1 else 2)
                lands = leaves if end == self.grid.ranks else leaves + length - 1
                yield Leg(result, keeper, 0, between, leaves, lands)

    def _arrivals(self) -> Iterator[Leg]:
        """A visitor comes while the last one is there, but not before all keepers have theirs."""
        table, length = self.table, self.table.locals
        _, between = self._channels(Channel.READ_WITHIN, Channel.READ_BETWEEN)
        for visitor in range(1, table.visitors):
            first = table.first_pass(visitor)
            leaves = max(first - table.held, table.held) if visitor > 1 else 0
            ends = leaves * length, first * length - 1
            yield Leg(self.sent.other, 0, visitor, between, *ends)

    def _departures(self, result: Kind) -> Iterator[Leg]:
        """A visitor's result goes home while the next one is there, or the rank's own."""
        table, length = self.table, self.table.locals
        _, between = self._channels(Channel.GRADIENT_WITHIN, Channel.GRADIENT_BETWEEN)
        for visitor in range(1, table.visitors):
            leaves = table.first_pass(visitor) + table.held
            lands = min(leaves + table.held, len(table.passes))
            ends = leaves * length, lands * length - 1
            yield Leg(result, visitor, 0, between, *ends)


@dataclass(frozen=True, slots=True)
class _Table:
    """The ranks at their places [row, column, local]: a row and a column are a node."""

    ranks: Ints
    places: Ints  # [3, rank]

    @property
    def held(self) -> int:
        """H, the nodes of a column."""
        return self.ranks.shape[0]

    @property
    def visitors(self) -> int:
        """V, the nodes of a row."""
        return self.ranks.shape[1]

    @property
    def locals(self) -> int:
        """L, the ranks of a node."""
        return self.ranks.shape[2]

    @property
    def passes(self) -> Sequence[tuple[int, int]]:
        """Of each pass: from how many columns away the visitor is, and from how many rows away
        the node whose blocks go around."""
        visits = product(range(1, self.visitors), range(self.held))
        return [(0, 0), *visits, *((0, node) for node in range(1, self.held))]

    def first_pass(self, visitor: int) -> int:
        """Return the first pass of a visitor, 1 or more columns away."""
        return 1 + (visitor - 1) * self.held

    def keeper(self, node: int) -> int:
        """Return the station of the rank that keeps a block, so many rows from its owner."""
        return (node + 1) * self.locals if node else 0

    def away(
        self, offsets: Sequence[tuple[int, int, int]], ranks: Sequence[int] | None = None
    ) -> Ints:
        """Return who is so far from ranks, if not given from all, in a cycle: [offset, rank]."""
        rows, columns, locals_ = np.array(offsets).T[:, :, None]
        row, column, local = self.places if ranks is None else self.places[:, ranks]
        held, visitors, length = self.ranks.shape
        flat = ((row + rows) % held * visitors + (column + columns) % visitors) * length
        return self.ranks.reshape(-1)[flat + (local + locals_) % length]

    def by_place(self, pairs: NDArray[Any]) -> NDArray[Any]:
        """Return what is known of two ranks by the places of both."""
        order = self.ranks.ravel()
        if (np.diff(order) != 1).any():  # else it is theirs already, which saves a large copy
            pairs = pairs[np.ix_(order, order)]
        return pairs.reshape(2 * self.ranks.shape)

    def by_rank(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return by rank what is known by place."""
        return values[*self.places]


@lru_cache(maxsize=2)
def _pairs(mesh: Mesh) -> Ints:
    seen, table = mesh.tiling.needs.pairs, mesh.table
    by_place = table.by_place(seen if mesh.sent is Kind.KV else seen.T)
    return table.by_rank(by_place.sum(axis=(1, 3, 5)).transpose(0, 2, 1))


@lru_cache(maxsize=2)
def _around(mesh: Mesh) -> Ints:
    """Return who is at the stations of what is sent around."""
    table = mesh.table
    nodes = np.repeat(table.passes, table.locals, axis=0)[:, 1]
    steps = nodes * table.locals + np.tile(np.arange(table.locals), len(table.passes))
    places = product(range(table.held), (0,), range(table.locals))
    return table.away([*places])[steps]


@lru_cache(maxsize=2)
def _useful_around(mesh: Mesh) -> Bools:
    """Return who has a use there for what is sent around."""
    table, owners = mesh.table, np.arange(mesh.grid.ranks)
    visitors = np.repeat(table.passes, table.locals, axis=0)[:, 0]
    guests = table.away([(0, -visitor, 0) for visitor in range(table.visitors)])
    useful = mesh.needed[guests[visitors[:, None], _around(mesh)], owners]
    for number, (_, node) in enumerate(table.passes):  # at its keeper it is in every pass
        useful[table.keeper(node)] |= useful[number * table.locals]
    return useful


@lru_cache(maxsize=2)
def _useful_visits(mesh: Mesh) -> Bools:
    """Return who has a use there for what visits."""
    table, visitors = mesh.table, np.arange(mesh.table.visitors)
    met = table.by_rank(table.by_place(mesh.needed).any(axis=(3, 5)))  # [owner, column]
    columns = (table.places[1] + visitors[:, None]) % table.visitors
    return np.take_along_axis(met.T, columns, axis=0)


@lru_cache(maxsize=16)
def _table(grid: Grid, held: int) -> _Table:
    rows = grid.rows if grid.nodes > 1 else tuple((rank,) for rank in grid.rows[0])
    ranks = np.array(rows).reshape(held, -1, len(rows[0]))
    order = np.argsort(ranks, axis=None)
    return _Table(ranks, np.array(np.unravel_index(order, ranks.shape)))


def meshes(tiling: Tiling, grid: Grid, sent: Kind) -> Iterator[Mesh]:
    """Return the meshes of a grid: more than one node, or rank, in a row and in a column."""
    nodes = grid.nodes if grid.nodes > 1 else grid.ranks
    return (
        Mesh(tiling, grid, held, sent) for held in range(2, nodes // 2 + 1) if nodes % held == 0
    )
