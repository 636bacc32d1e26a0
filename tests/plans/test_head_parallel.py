"""All-to-all over some ranks, rings over the others: who, which tokens, oracle. (fast tier)"""

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst import BurstConfig, ring_attention
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.head_parallel import HeadGroups, head_groups, kv_head_copies
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, choose_grid
from megatron_burst.plans.visibility.layout import (
    Layout,
    contiguous,
    segmented_zigzag,
    striped,
    zigzag,
)
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.transport.links import machine_here
from tests.attention.cases import LAYOUT_NAMES, Case, answer, check, logged, run_cases
from tests.plans.masks import LAYOUTS, Masking, hard_maskings, maskings
from tests.plans.simulator import bytes_sent
from tests.tier import examples, one_in, slow_if, some
from tests.workers import Team, WorkerPool

# Who


@pytest.mark.parametrize(
    ("nodes", "size", "groups"),
    [
        ("aaaa", 2, ((0, 1), (2, 3))),
        ("abab", 2, ((0, 2), (1, 3))),
        ("abba", 1, ((0,), (1,), (2,), (3,))),  # the rank in a ring of all is the rank
        ("aaaabb", 2, ((0, 1), (2, 3), (4, 5))),
        ("bbaabb", 2, ((0, 1), (2, 3), (4, 5))),
        ("abbaab", 3, ((0, 3, 4), (1, 2, 5))),
        ("aaaa", 4, ((0, 1, 2, 3),)),
        ("abab", 4, ((0, 2, 1, 3),)),  # of several whole nodes
        ("aabbccdd", 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("abcd", 2, ((0, 1), (2, 3))),
    ],
)
def test_groups_follow_each_other_on_a_node(
    nodes: str, size: int, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert head_groups(nodes, size) == HeadGroups(groups)


@pytest.mark.parametrize(
    ("nodes", "size", "held"),
    [("aaab", 2, "3, 1"), ("aabbcc", 4, "2, 2, 2"), ("aabbcc", 3, "2, 2, 2")],
)
def test_a_node_that_does_not_divide_is_refused_with_the_numbers(
    nodes: str, size: int, held: str
) -> None:
    text = f"--burst-head-parallel-size {size} needs {size} ranks of a node .* nodes hold {held}:"
    with pytest.raises(ValueError, match=text):
        head_groups(nodes, size)


def test_members_of_one_index_form_a_ring() -> None:
    groups = head_groups("abab", 2)
    assert [groups.ring(index) for index in range(2)] == [(0, 1), (2, 3)]
    assert [groups.coordinates(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("heads", "copies"),
    [((8, 8, 4), 1), ((8, 4, 4), 1), ((8, 2, 4), 2), ((8, 1, 8), 8), ((6, 3, 3), 1)],
)
def test_kv_heads_are_copied_where_there_are_too_few(
    heads: tuple[int, int, int], copies: int
) -> None:
    assert kv_head_copies(*heads) == copies


@pytest.mark.parametrize("heads", [(6, 6, 4), (12, 3, 4), (12, 6, 4), (2, 2, 4), (4, 4, 3)])
def test_heads_that_do_not_divide_are_refused_with_the_numbers(heads: tuple[int, int, int]) -> None:
    text = re.escape("{} query and {} kv heads of a rank, after tensor parallelism".format(*heads))
    with pytest.raises(ValueError, match=f"{text}.* over {heads[2]} ranks"):
        kv_head_copies(*heads)


# Which tokens

EIGHT = head_groups("aaaabbbb", 2)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (contiguous(16, 8), contiguous(16, 4)),
        (zigzag(16, 8), zigzag(16, 4)),
        (segmented_zigzag([16, 16], 8), segmented_zigzag([16, 16], 4)),
    ],
)
def test_the_ring_of_neighbours_has_the_layout_of_fewer_ranks(
    layout: Layout, expected: Layout
) -> None:
    found = EIGHT.ring_layout(layout)
    assert [found.positions(r).tolist() for r in range(4)] == [
        expected.positions(r).tolist() for r in range(4)
    ]
    # Ranges that touch are one: at most as many as where they are not joined.
    assert all(len(a) <= len(b) for a, b in zip(found.shards, expected.shards, strict=True))


@pytest.mark.parametrize(("ranks", "size"), [(4, 1), (4, 2), (16, 4), (64, 1)])
def test_the_planner_sees_that_the_ranks_of_a_ring_are_alike(ranks: int, size: int) -> None:
    """Also the last one, whose chunks follow each other; else planning takes six times as long."""
    layout = head_groups([0] * ranks, size).ring_layout(zigzag(4 * ranks, ranks))
    for mask in (Mask.causal(), Mask.full(), Mask.causal(window=5)):
        assert len(Tiling(layout, mask).visible.parts[0].counts) < ranks**2


def test_striped_groups_hold_several_ranges() -> None:
    found = EIGHT.ring_layout(striped(16, 8))
    assert found.shards[1] == (range(2, 16, 8), range(3, 16, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_of_all_holds_the_whole_sequence(layout: str) -> None:
    assert head_groups("a" * 4, 4).ring_layout(LAYOUTS[layout](32, 4)).shards == ((range(32),),)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_is_a_group_of_its_own_keeps_its_order(ranks: int) -> None:
    out_of_order = Layout(
        tuple((range(4 * r + 2, 4 * r + 4), range(4 * r, 4 * r + 2)) for r in range(ranks))
    )
    assert head_groups("a" * ranks, 1).ring_layout(out_of_order) == out_of_order


PLACES = [("aaaa", 2), ("abab", 2), ("aaaabbbb", 4), ("abababab", 2), ("aaaa", 4), ("aaa", 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("nodes", "size"), PLACES)
def test_the_tokens_of_the_members_together_are_those_of_their_ring(
    layout: str, nodes: str, size: int
) -> None:
    ranks = len(nodes)
    whole, groups = LAYOUTS[layout](8 * ranks, ranks), head_groups(nodes, size)
    ring = groups.ring_layout(whole)
    assert ring.tokens == whole.tokens and ring.ranks == ranks // size
    for number, members in enumerate(groups.groups):
        held = ring.positions(number)
        local = groups.member_layout(whole, number)
        joined = local.unshard([whole.positions(rank) for rank in members], dim=0)
        assert torch.equal(joined, held)
        for index, rank in enumerate(members):
            assert torch.equal(local.shard(held, index, dim=0), whole.positions(rank))


# Against the oracle


def heads_for(size: int, turn: int) -> tuple[int, int]:
    """As many kv heads as query heads, as many as the ranks, and fewer, which are copied."""
    half = size // 2 if size % 2 == 0 else size
    return 2 * size, [2 * size, half, size, 1, half][turn % 5]


RINGS: list[dict[str, Any]] = [
    {"backward": "kv"},
    {"backward": "query"},
    {"algorithm": "ring"},
    {"backward": "query", "grad_dtype": "model"},
]


PLACED = [(2, 2, 8), (3, 3, 8), (4, 2, 2), (4, 4, 4), (8, 2, 4)]
MORE = [(4, 2, 8), (5, 5, 8), (6, 2, 2), (6, 3, 8), (7, 7, 8), (8, 4, 4), (8, 2, 8), (8, 8, 8)]


@pytest.mark.parametrize("place", slow_if(MORE, PLACED + MORE), ids=str)
def test_every_layout_and_backward(workers: WorkerPool, place: tuple[int, int, int]) -> None:
    ranks, size, per_node = place
    nodes = {"ranks_per_node": per_node, "head_parallel_size": size}
    cases = [
        Case(
            config={"layout": layout, **config, **nodes},
            chunk=2,
            heads=heads_for(size, turn),
            has_sink=turn % 2 == 0,
        )
        for turn, (layout, config) in enumerate(itertools.product(LAYOUT_NAMES, RINGS))
    ]
    check(some(cases, 5, ranks % 5), ranks, workers)


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_hard_masks_equal_the_oracle(workers: WorkerPool, size: int) -> None:
    """With 8 ranks the window of a chunk of the hybrid ring is one of 12 tokens."""
    turns = itertools.cycle(itertools.product(LAYOUT_NAMES, RINGS))
    cases = [
        Case(
            config={"layout": layout, "head_parallel_size": size, "ranks_per_node": 4, **config},
            chunk=chunk,
            masking=masking,
            heads=heads_for(size, turn),
            dim=3,
        )
        for chunk in (2, 6)
        for turn, (masking, (layout, config)) in enumerate(
            zip(hard_maskings(4, 2 * chunk).values(), turns, strict=False)
        )
    ]
    check(some(cases, 13, size), 8, workers)


@examples(25)
@given(data=st.data())
def test_any_hybrid_equals_the_oracle(workers: WorkerPool, data: st.DataObject) -> None:
    def one_of(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    ranks, size = one_of((2, 2), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4), (8, 8))
    chunk, copies = one_of(1, 2, 3), one_of(1, 2)
    kv_heads = size // copies if size % copies == 0 else size
    is_double = one_of(False, True) and ranks % 4 == 0 and size < 8
    nodes = {"ranks_per_node": 4, "topology": "double"} if is_double else {}
    layout = one_of(*LAYOUT_NAMES)
    case = Case(
        config={**one_of(*RINGS), **nodes, "layout": layout, "head_parallel_size": size},
        chunk=2 * chunk,
        masking=data.draw(maskings(4 * ranks * chunk)),
        heads=(size * one_of(1, 3), kv_heads),
        value_dim=one_of(6, 4, 8),
        has_sink=one_of(False, True),
    )
    check([case], ranks, workers)


# Bytes


@pytest.mark.parametrize(
    ("kv_heads", "masking", "backward"),
    one_in(3, itertools.product([4, 1], [Masking(), Masking(window=6)], ["kv", "query"])),
    ids=str,
)
def test_bytes_are_those_of_the_plan_and_of_the_exchange(
    workers: WorkerPool, backward: str, masking: Masking, kv_heads: int
) -> None:
    """Of 8 ranks, 4 a node, pairs share out 4 heads; log-sum-exps go, too."""
    config = {"backward": backward, "head_parallel_size": 2, "ranks_per_node": 4}
    case = Case(config=config, chunk=6, masking=masking, heads=(4, kv_heads), dim=6)
    (answer,) = run_cases(workers, 8, [case])
    groups = head_groups("aaaabbbb", 2)
    grid, _ = choose_grid(BurstConfig(**config).topology, "aabb")
    assert grid == Grid(((0, 1), (2, 3)))
    shape = Shape(24, 2, max(kv_heads // 2, 1), 6, 6, 4, 4)
    tiling = Tiling(groups.ring_layout(make_layout(BurstConfig(**config), 96, 8)), masking.mask)
    links = Links.of("aabb", shape, machine_here(), 2)
    choice = choose(BurstConfig(**config), tiling, grid, shape, "aabb", links=links)
    rows = 12 * 4 * 4 // 2  # of the log-sum-exps: half of the heads of this rank's tokens
    for rank, reply in enumerate(answer.replies):
        forward_plan, backward_plan = choice.plans(groups.coordinates(rank)[0])
        sizes = shape.item_bytes()
        forward = (
            bytes_sent(forward_plan, shape.item_bytes(backward=False), 24)
            + shape.exchange_bytes(2)
            + rows
        )
        backward_bytes = bytes_sent(backward_plan, sizes, 24) + shape.exchange_bytes(2)
        assert (reply.forward.total(), reply.backward.total()) == (forward, backward_bytes)
    # n·(Hq + Hkv)·(dk + dv)·e·(U - 1)/U of a rank's own tokens, the copies counted.
    assert shape.exchange_bytes(2) == 12 * (4 + max(kv_heads, 2)) * 12 * 4 // 2


def first_line(team: Team) -> list[str]:
    with logged() as lines:
        answer(team, [Case(config={"head_parallel_size": 2}, chunk=8, heads=(4, 2), dim=8)])
    return [line for line in lines if "FLOPs" in line]


def test_the_log_says_what_the_exchange_sends(workers: WorkerPool) -> None:
    (line,) = workers.run(4, first_line)[0]
    assert "4 ranks (zigzag, heads over 2 ranks, flat ring)" in line, line
    # 16 tokens x (4 + 2) heads x (8 + 8) x 4 bytes, of which half leaves
    assert f"all-to-all over the heads sends {3072 / 2**20:.2f} MiB a rank" in line, line


# What is refused


def refusal(team: Team, config: dict[str, Any], heads: tuple[int, int]) -> str:
    q, kv = torch.zeros(1, 8, heads[0], 8), torch.zeros(1, 8, heads[1], 8)
    try:
        ring_attention(q, kv, kv, team.context(BurstConfig(**config)), mask=Masking().mask)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("ranks", "config", "heads", "message"),
    [
        (4, {"head_parallel_size": 4}, (6, 6), "6 query and 6 kv heads of a rank"),
        (4, {"head_parallel_size": 2, "ranks_per_node": 5}, (4, 4), "the nodes hold 1, 3"),
        (3, {"algorithm": "ulysses"}, (4, 4), "4 query and 4 kv heads of a rank"),
        (1, {"head_parallel_size": 2}, (4, 4), "of the 1 context-parallel ranks the nodes hold 1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_on_every_rank(
    workers: WorkerPool, ranks: int, config: dict[str, Any], heads: tuple[int, int], message: str
) -> None:
    (found,) = set(workers.run(ranks, refusal, config, heads))
    assert message in found and "change --burst-head-parallel-size" in found
