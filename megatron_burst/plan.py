"""Who sends what to whom and computes which tile when: frozen data made by pure functions.

A plan is one rank's whole forward or backward. In the flat kv ring K and V go around from rank r
to r+1. Backward, the gradient of a block follows it: it starts at the first rank after the block's
owner, collects one partial sum a rank, and comes home in the last step, where the owner's own
partial has waited.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from megatron_burst.layout import Interval, Layout
from megatron_burst.mask import Mask, Relation


class Kind(StrEnum):
    """What an item is made of."""

    KV = "kv"
    QUERY = "query"
    D_KV = "d_kv"
    D_QUERY = "d_query"

    @property
    def is_gradient(self) -> bool:
        """Whether items of this kind are sums that grow, not blocks that are read."""
        return self in (Kind.D_KV, Kind.D_QUERY)


class Item(NamedTuple):
    """Something that can travel: the tensors of one kind that belong to one rank's tokens."""

    kind: Kind
    owner: int

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.owner}"


class Transfer(NamedTuple):
    """One item on its way to, or from, a peer."""

    item: Item
    peer: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel call: rows of one rank's queries against rows of one rank's keys."""

    query_owner: int
    key_owner: int
    query_rows: Interval
    key_rows: Interval
    relation: Relation

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs the tile's mask lets through."""
        queries, keys = self.query_rows.length, self.key_rows.length
        return queries * (queries + 1) // 2 if self.relation is Relation.CAUSAL else queries * keys


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers that are posted together and the tiles that are computed while they travel.

    An arriving block can be used from the next step on. An arriving gradient is added to what the
    rank has of that item. A gradient that is sent is handed on: the rank no longer has it.
    """

    receives: tuple[Transfer, ...] = ()
    sends: tuple[Transfer, ...] = ()
    tiles: tuple[Tile, ...] = ()
    release: tuple[Item, ...] = ()  # blocks that no later step of this rank needs


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's forward or backward, step by step."""

    rank: int
    steps: tuple[Step, ...]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles in the order they are computed."""
        return tuple(tile for step in self.steps for tile in step.tiles)


def flat_ring_forward(layout: Layout, mask: Mask, rank: int) -> Plan:
    """Plan a forward in which K and V travel once around the ring."""
    ring = _FlatRing(layout, mask, rank)
    steps = [
        Step(receives=ring.read_arrives(s), sends=ring.read_leaves(s), tiles=ring.tiles(s))
        for s in range(layout.ranks)
    ]
    return _finish(rank, steps)


def flat_kv_backward(layout: Layout, mask: Mask, rank: int) -> Plan:
    """Plan a backward in which K and V travel again and their gradients follow one step behind.

    A gradient is P-1 hops on its way, as many as its block.
    """
    ring = _FlatRing(layout, mask, rank)
    steps = [
        Step(
            receives=ring.read_arrives(s) + ring.gradient_arrives(s),
            sends=ring.read_leaves(s) + ring.gradient_leaves(s),
            tiles=ring.tiles(s),
        )
        for s in range(layout.ranks + 1)
    ]
    return _finish(rank, steps)


class _FlatRing:
    """What happens at each step of a ring r -> r+1; step s computes with the block of rank r-s.

    Nothing travels that nobody further on needs: a block stops after the last rank with a tile for
    it, and a gradient starts at the first rank that has something to add.
    """

    def __init__(self, layout: Layout, mask: Mask, rank: int) -> None:
        self.rank, self.ranks = rank, layout.ranks
        self.next, self.previous = (rank + 1) % self.ranks, (rank - 1) % self.ranks
        self._layout, self._mask = layout, mask
        self._known: dict[tuple[int, int], tuple[Tile, ...]] = {}

    def tiles(self, step: int) -> tuple[Tile, ...]:
        return self._tiles(self.rank, step) if step < self.ranks else ()

    def read_arrives(self, step: int) -> tuple[Transfer, ...]:
        return self._transfer(Kind.KV, step + 1, self.previous, self._needed(step + 1))

    def read_leaves(self, step: int) -> tuple[Transfer, ...]:
        return self._transfer(Kind.KV, step, self.next, self._needed(step + 1, self.rank + 1))

    def gradient_arrives(self, step: int) -> tuple[Transfer, ...]:
        return self._transfer(Kind.D_KV, step, self.previous, self._begun(step - 1, self.rank - 1))

    def gradient_leaves(self, step: int) -> tuple[Transfer, ...]:
        return self._transfer(Kind.D_KV, step - 1, self.next, self._begun(step - 1))

    def _transfer(self, kind: Kind, step: int, peer: int, wanted: bool) -> tuple[Transfer, ...]:
        """The transfer of the block (or its gradient) that this rank computes with at `step`."""
        owner = (self.rank - step) % self.ranks
        return (Transfer(Item(kind, owner), peer),) if wanted else ()

    def _needed(self, step: int, rank: int | None = None) -> bool:
        """Whether the block that `rank` has at `step` is of use to it or to a rank after it."""
        rank = self.rank if rank is None else rank
        return any(self._has_tiles(rank + k, step + k) for k in range(self.ranks - step))

    def _begun(self, step: int, rank: int | None = None) -> bool:
        """Whether the gradient that `rank` has after `step` holds a partial sum of a visitor."""
        rank = self.rank if rank is None else rank
        return any(self._has_tiles(rank - k, step - k) for k in range(step))

    def _has_tiles(self, rank: int, step: int) -> bool:
        return bool(self._tiles(rank % self.ranks, step))

    def _tiles(self, rank: int, step: int) -> tuple[Tile, ...]:
        if (rank, step) not in self._known:
            owner = (rank - step) % self.ranks
            self._known[rank, step] = tiles_of_pair(self._layout, self._mask, rank, owner)
        return self._known[rank, step]


def tiles_of_pair(layout: Layout, mask: Mask, query_owner: int, key_owner: int) -> tuple[Tile, ...]:
    """Return the fewest tiles that cover what one rank's queries see of another's keys.

    Neighbouring intervals with the same relation share a tile, because few large kernel calls
    run faster than many small ones.
    """
    queries, keys = layout.local_rows(query_owner), layout.local_rows(key_owner)
    table = [
        [mask.relation(query, key) for key in layout.shards[key_owner]]
        for query in layout.shards[query_owner]
    ]

    def tile(rows: Sequence[int], columns: Sequence[int], relation: Relation) -> Tile:
        return Tile(
            query_owner,
            key_owner,
            Interval(queries[rows[0]].start, queries[rows[-1]].stop),
            Interval(keys[columns[0]].start, keys[columns[-1]].stop),
            relation,
        )

    if _is_lower_triangle(table):
        whole = range(len(table))
        return (tile(whole, whole, Relation.CAUSAL),)
    return tuple(
        tile(rows, columns, relation)
        for rows in _runs(table)
        for columns in _runs(table[rows[0]])
        if (relation := table[rows[0]][columns[0]]) is not Relation.EMPTY
    )


def _is_lower_triangle(table: Sequence[Sequence[Relation]]) -> bool:
    """Whether the rows in local order make one causal square, as a rank's own tile does."""
    return all(
        relation is (Relation.FULL if c < r else Relation.CAUSAL if c == r else Relation.EMPTY)
        for r, row in enumerate(table)
        for c, relation in enumerate(row)
    )


def _runs[T](values: Sequence[T]) -> list[list[int]]:
    """Group the indices of neighbours that are equal."""
    return [list(group) for _, group in groupby(range(len(values)), values.__getitem__)]


def _finish(rank: int, steps: Sequence[Step]) -> Plan:
    """Drop steps in which nothing happens and note after which step a block is of no more use."""
    steps = [step for step in steps if step.receives or step.sends or step.tiles]
    last_use: dict[Item, int] = {}
    for index, step in enumerate(steps):
        for item in _blocks_used(step):
            last_use[item] = index
    return Plan(
        rank,
        tuple(
            replace(step, release=tuple(i for i, last in last_use.items() if last == index))
            for index, step in enumerate(steps)
        ),
    )


def _blocks_used(step: Step) -> list[Item]:
    moved = [t.item for t in (*step.receives, *step.sends) if not t.item.kind.is_gradient]
    read = [item for t in step.tiles for item in blocks_of_tile(t)]
    return moved + read


def blocks_of_tile(tile: Tile) -> tuple[Item, Item]:
    """Return the query and the key block that a tile reads."""
    return Item(Kind.QUERY, tile.query_owner), Item(Kind.KV, tile.key_owner)


def gradients_of_tile(tile: Tile) -> tuple[Item, Item]:
    """Return the query and the key gradient that a tile adds to."""
    return Item(Kind.D_QUERY, tile.query_owner), Item(Kind.D_KV, tile.key_owner)
