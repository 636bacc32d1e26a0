"""The rank grid: made from where ranks are, and visited in the order of rings. (fast tier)"""

import itertools

import pytest

from megatron_burst.config import Topology
from megatron_burst.plans.schedules.topology import Grid, choose_grid, flat_grid, visits


@pytest.mark.parametrize("topology", [Topology.AUTO, Topology.DOUBLE])
@pytest.mark.parametrize(
    ("nodes", "rows", "unequal"),
    [
        ("aaaabbbb", ((0, 1, 2, 3), (4, 5, 6, 7)), ""),
        ("bababa", ((0, 2, 4), (1, 3, 5)), ""),  # rows need not be consecutive
        ("aaaaabbbbbccccc", tuple(itertools.batched(range(15), 5)), ""),
        ("abcde", ((0,), (1,), (2,), (3,), (4,)), ""),  # one column
        ("aabb", ((0, 1), (2, 3)), ""),
        ("aabbbbcc", (tuple(range(8)),), "2, 4, 2"),
        ("abacab", ((0, 2, 4, 1, 5, 3),), "3, 2, 1"),  # leaves each node once
    ],
)
def test_equal_nodes_are_rows_and_unequal_ones_a_flat_ring(
    topology: Topology, nodes: str, rows: tuple[tuple[int, ...], ...], unequal: str
) -> None:
    why = f"its nodes hold unequal numbers of ranks ({unequal})" if unequal else ""
    assert choose_grid(topology, nodes) == (Grid(rows), why)


def test_a_grid_says_what_it_is() -> None:
    grid = Grid(((0, 2, 4), (1, 3, 5)))
    assert (grid.nodes, grid.ranks_per_node, grid.ranks) == (2, 3, 6)
    assert str(grid) == "double ring of 2 nodes x 3 ranks"
    flat, reason = choose_grid(Topology.FLAT, "bababa")
    assert (flat.rows, reason, str(flat)) == (((0, 2, 4, 1, 3, 5),), "", "flat ring")


@pytest.mark.parametrize("topology", Topology)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_one_node_makes_a_flat_ring(topology: Topology, ranks: int) -> None:
    assert choose_grid(topology, ["a"] * ranks) == (flat_grid(ranks), "")


@pytest.mark.parametrize("grid", [flat_grid(1), flat_grid(5), Grid(((4, 0), (3, 1), (2, 5)))])
def test_a_rank_is_at_its_place_and_places_are_cyclic(grid: Grid) -> None:
    for rank in range(grid.ranks):
        node, local = grid.coordinates(rank)
        assert grid.rows[node][local] == grid.at(node, local) == rank
        assert grid.at(node - grid.nodes, local + 2 * grid.ranks_per_node) == rank


@pytest.mark.parametrize(("nodes", "length"), [*itertools.product([1, 2, 3, 4], [1, 2, 3, 8])])
def test_visits_go_backwards_around_the_node_and_then_to_the_node_before(
    nodes: int, length: int
) -> None:
    grid = Grid(tuple(itertools.batched(range(nodes * length), length)))
    for rank, held in enumerate(visits(grid, range(grid.ranks)).T.tolist()):
        assert held == [
            (rank // length - step // length) % nodes * length + (rank - step) % length
            for step in range(grid.ranks)
        ]
        assert sorted(held) == list(range(grid.ranks))
