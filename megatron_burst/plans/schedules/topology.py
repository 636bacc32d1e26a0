"""The rank grid: which context-parallel ranks share a node, and in what order rings visit them.

The ranks are those of one context-parallel group, 0 … P-1. A grid is a value: it knows nothing of
torch.distributed, and equal placements give equal grids.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron_burst.config import Topology
from megatron_burst.plans.visibility.band import Ints


@dataclass(frozen=True)
class Grid:
    """Rows of ranks, a row a node, all of one length: M nodes of L ranks.

    Rank (node, local) sends to (node, local + 1) within its node and to (node + 1, local) between
    nodes, both cyclic. A single row is a flat ring.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def nodes(self) -> int:
        """M, the number of nodes."""
        return len(self.rows)

    @property
    def ranks_per_node(self) -> int:
        """L, the number of ranks of a node."""
        return len(self.rows[0])

    @property
    def ranks(self) -> int:
        """P = M x L."""
        return self.nodes * self.ranks_per_node

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return the (node, local) of a rank."""
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        rows = enumerate(self.rows)
        return {rank: (node, local) for node, row in rows for local, rank in enumerate(row)}

    def at(self, node: int, local: int) -> int:
        """Return the rank at (node, local), both cyclic."""
        return self.rows[node % self.nodes][local % self.ranks_per_node]

    def after(self, rank: int) -> int:
        """Return the next rank of the row, to which a ring within the node sends."""
        node, local = self.coordinates(rank)
        return self.at(node, local + 1)

    def __str__(self) -> str:
        if 1 in (self.nodes, self.ranks_per_node):
            return "flat ring"
        return f"double ring of {self.nodes} nodes x {self.ranks_per_node} ranks"


@lru_cache(maxsize=1)
def stations(grid: Grid) -> Ints:
    """Return which rank holds an owner's block in each step: [step, owner]."""
    return _away(grid, range(grid.ranks), 1)


def visits(grid: Grid, ranks: Sequence[int]) -> Ints:
    """Return whose blocks ranks hold, first those of their node, then node by node: [step, rank].

    The inverse of `stations`.
    """
    return _away(grid, ranks, -1)


def _away(grid: Grid, ranks: Sequence[int], sign: int) -> Ints:
    """Return who is p nodes and s places on, or back, from each rank: [p·L + s, rank]."""
    rows, (node, place) = np.array(grid.rows), np.array([*map(grid.coordinates, ranks)]).T
    passes, steps = np.arange(grid.nodes)[:, None, None], np.arange(grid.ranks_per_node)[:, None]
    away = rows[(node + sign * passes) % grid.nodes, (place + sign * steps) % grid.ranks_per_node]
    return away.reshape(grid.ranks, len(ranks))


def flat_grid(ranks: int) -> Grid:
    """Return one ring through the ranks in their order."""
    return Grid((tuple(range(ranks)),))


def by_node(nodes: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks by the node they are on, given the node of each; the first seen is first."""
    on_node: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        on_node.setdefault(node, []).append(rank)
    return tuple(map(tuple, on_node.values()))


def choose_grid(topology: Topology, nodes: Sequence[Hashable]) -> tuple[Grid, str]:
    """Return the grid of ranks that are placed on these nodes, and "" or why it had to be flat.

    A flat ring visits the ranks node by node, so that it leaves each node once. A double ring
    needs as many ranks on every node; else it becomes a flat one.
    """
    rows = by_node(nodes)
    flat = Grid((tuple(rank for row in rows for rank in row),))
    if topology is Topology.FLAT or len(rows) == 1:
        return flat, ""
    if len({len(row) for row in rows}) > 1:
        held = ", ".join(str(len(row)) for row in rows)
        return flat, f"its nodes hold unequal numbers of ranks ({held})"
    return Grid(rows), ""
