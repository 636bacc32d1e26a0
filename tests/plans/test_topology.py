"""The rank grid: made from where ranks are, and visited in the order of rings. (fast tier)"""

import itertools

import pytest

from megatron_burst.config import Topology
from megatron_burst.plans.schedules.topology import Grid, choose_grid, flat_grid

AUTO, FLAT, DOUBLE = Topology.AUTO, Topology.FLAT, Topology.DOUBLE
both_doubles = pytest.mark.parametrize("topology", [AUTO, DOUBLE])


def hosts(ranks_of_job: range, ranks_per_node: int) -> list[str]:
    """The host names of these ranks of a job, which fills one node after the other."""
    return [f"node-{rank // ranks_per_node}" for rank in ranks_of_job]


@both_doubles
def test_ranks_on_two_nodes_make_two_rows(topology: Topology) -> None:
    grid, reason = choose_grid(topology, hosts(range(8), 4))
    assert grid.rows == ((0, 1, 2, 3), (4, 5, 6, 7)) and reason == ""
    assert (grid.nodes, grid.ranks_per_node, grid.ranks) == (2, 4, 8)
    assert str(grid) == "double ring of 2 nodes x 4 ranks"


@both_doubles
def test_a_group_of_every_second_rank_of_the_job_has_rows_half_as_long(topology: Topology) -> None:
    # Tensor parallelism takes neighbours: ranks 1, 3, 5 ... of a job with 8 a node are one group.
    grid, reason = choose_grid(topology, hosts(range(1, 16, 2), 8))
    assert grid.rows == ((0, 1, 2, 3), (4, 5, 6, 7)) and reason == ""


@both_doubles
def test_ranks_that_take_turns_on_the_nodes_make_rows_that_are_not_consecutive(
    topology: Topology,
) -> None:
    grid, _ = choose_grid(topology, ["b", "a", "b", "a", "b", "a"])
    assert grid.rows == ((0, 2, 4), (1, 3, 5))
    flat, reason = choose_grid(FLAT, ["b", "a", "b", "a", "b", "a"])
    assert flat.rows == ((0, 2, 4, 1, 3, 5),) and reason == ""
    assert str(flat) == "flat ring"


@both_doubles
def test_a_group_that_does_not_start_at_a_node_is_flat_by_node_if_its_rows_are_unequal(
    topology: Topology,
) -> None:
    grid, reason = choose_grid(topology, hosts(range(2, 10), 4))  # 2, 4 and 2 of its ranks
    assert grid.rows == (tuple(range(8)),)
    assert reason == "its nodes hold unequal numbers of ranks (2, 4, 2)"
    evenly, reason = choose_grid(topology, hosts(range(2, 6), 4))  # 2 and 2
    assert evenly.rows == ((0, 1), (2, 3)) and reason == ""


@both_doubles
def test_unequal_nodes_make_a_flat_ring_that_leaves_each_node_once(topology: Topology) -> None:
    nodes = ["a", "b", "a", "c", "a", "b"]
    grid, reason = choose_grid(topology, nodes)
    assert grid.rows == ((0, 2, 4, 1, 5, 3),)
    assert "unequal numbers of ranks (3, 2, 1)" in reason
    (ring,) = grid.rows
    crossings = sum(nodes[a] != nodes[b] for a, b in zip(ring, ring[1:] + ring[:1], strict=True))
    assert crossings == 3


@pytest.mark.parametrize("topology", Topology)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_one_node_makes_a_flat_ring(topology: Topology, ranks: int) -> None:
    assert choose_grid(topology, ["a"] * ranks) == (flat_grid(ranks), "")


@both_doubles
def test_one_rank_a_node_makes_one_column(topology: Topology) -> None:
    grid, reason = choose_grid(topology, hosts(range(5), 1))
    assert grid.rows == ((0,), (1,), (2,), (3,), (4,)) and reason == ""
    assert choose_grid(FLAT, hosts(range(5), 1))[0] == flat_grid(5)


@both_doubles
def test_odd_nodes_and_odd_rows_are_welcome(topology: Topology) -> None:
    grid, reason = choose_grid(topology, hosts(range(15), 5))
    assert (grid.nodes, grid.ranks_per_node, reason) == (3, 5, "")


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
    for rank in range(grid.ranks):
        visits = grid.visits(rank)
        assert visits == tuple(
            (rank // length - step // length) % nodes * length + (rank - step) % length
            for step in range(grid.ranks)
        )
        assert sorted(visits) == list(range(grid.ranks))
