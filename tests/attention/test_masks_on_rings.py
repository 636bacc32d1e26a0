"""Every mask on every ring and layout against the dense oracle. (fast tier)"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.attention.preparing import prepare
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import zigzag_of_each
from megatron_burst.plans.visibility.mask import Mask
from tests.attention.cases import (
    LAYOUT_NAMES,
    Case,
    answer,
    check,
    logged,
    run_cases,
    variants,
)
from tests.plans.masks import LAYOUTS, Masking, dealt, documents_of, hard_maskings, maskings
from tests.plans.simulator import bytes_sent, simulate, tiles_of
from tests.tier import examples, in_turn, slow_if, some
from tests.workers import Team, WorkerPool

VARIANTS = variants(["flat"])
GRIDS = [flat_grid(1), flat_grid(3), flat_grid(4), Grid(((0, 1), (2, 3))), Grid(((2, 0), (1, 3)))]


@pytest.mark.parametrize("ranks", slow_if([2], [1, 2, 3, 4]))
def test_the_hard_masks_on_every_layout(workers: WorkerPool, ranks: int) -> None:
    turns = itertools.cycle(VARIANTS)
    cases = [
        Case(config=config | {"layout": layout}, chunk=6, masking=masking, heads=(12, 12), dim=3)
        for layout in LAYOUT_NAMES
        for masking, config in zip(hard_maskings(ranks, 6).values(), turns, strict=False)
    ]
    # In the fast tier each mask on a layout or none, at three numbers of ranks on two or more.
    check(some(cases, 5, ranks), ranks, workers)


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_every_ring_under_masks_that_leave_little(
    workers: WorkerPool, config: dict[str, Any]
) -> None:
    maskings = hard_maskings(4, 4)
    names = ("window of a chunk", "documents that end one off", "blocks", "everything at once")
    cases = [Case(config=config, chunk=4, masking=maskings[n], heads=(8, 4)) for n in names]
    check(cases, 4, workers)


@examples(25)
@given(
    ranks=st.integers(1, 8),
    chunk=st.integers(1, 5),
    config=st.sampled_from(VARIANTS[:-1]),
    layout=st.sampled_from([*LAYOUT_NAMES, "given with the call"]),
    topology=st.sampled_from([("flat", None), ("double", 1), ("double", 2), ("double", 4)]),
    data=st.data(),
)
def test_any_mask_equals_the_oracle(
    workers: WorkerPool,
    ranks: int,
    chunk: int,
    config: dict[str, Any],
    layout: str,
    topology: tuple[str, int | None],
    data: st.DataObject,
) -> None:
    shape, length = topology
    place = {"topology": shape} | ({"ranks_per_node": length} if length else {})
    config = {**config, **(place if ranks % (length or 1) == 0 else {})}
    if layout in LAYOUT_NAMES:
        config["layout"], given = layout, None
    else:
        given = dealt(data.draw(st.permutations(range(4 * ranks))), chunk)
    masking = data.draw(maskings(4 * ranks * chunk))
    check([Case(config=config, chunk=2 * chunk, masking=masking, layout=given)], ranks, workers)


@examples(25)
@given(
    ranks=st.integers(1, 8),
    places=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    config=st.sampled_from(VARIANTS),
    shape=st.sampled_from(["flat", "double", "mesh"]),
    data=st.data(),
)
def test_documents_with_padding_each_in_a_zigzag_of_its_own(
    workers: WorkerPool,
    ranks: int,
    places: list[int],
    config: dict[str, Any],
    shape: str,
    data: st.DataObject,
) -> None:
    """As Megatron and RL frameworks split what they call THD."""
    if shape == "mesh" and ranks in (4, 8):
        config = {"topology": shape, "ranks_per_node": ranks % 8 or 2}
        config["backward"] = data.draw(st.sampled_from(["kv", "query"]))
    elif shape == "double" and ranks % 2 == 0 and config["algorithm"] != "ulysses":
        config = {**config, "topology": shape, "ranks_per_node": 2}
    tokens = [2 * ranks * place for place in places]
    lengths = tuple(data.draw(st.integers(0, most)) for most in tokens)
    window = data.draw(st.none() | st.integers(0, max(tokens)))
    masking = Masking(data.draw(st.booleans()), window, documents_of(tokens), None, lengths)
    layout = zigzag_of_each(tokens, ranks)
    heads = (ranks, ranks) if config.get("algorithm") == "ulysses" else (8, 2)
    shapes = {"chunk": sum(places), "heads": heads, "dim": 3}
    case = Case(config=config, masking=masking, layout=layout, **shapes)
    check([case], ranks, workers)


@examples(150)
@given(
    grid=st.sampled_from(GRIDS),
    chunk=st.integers(1, 3),
    layout=st.sampled_from([*LAYOUTS]),
    sent=st.sampled_from([Kind.KV, Kind.QUERY]),
    data=st.data(),
)
def test_plans_of_any_mask_fit_together(
    grid: Grid, chunk: int, layout: str, sent: Kind, data: st.DataObject
) -> None:
    tokens = 4 * grid.ranks * chunk
    masking = data.draw(maskings(tokens))
    tiling = Tiling(LAYOUTS[layout](tokens, grid.ranks), masking.mask)
    pairs = int(masking.visible(tokens).sum())
    for way in (Direct(tiling, grid, sent), Ring(tiling, grid, sent)):
        ranks = range(grid.ranks)
        simulate([way.backward(rank) for rank in ranks], backward=True, pairs=pairs)
        if sent is Kind.KV:
            simulate([way.forward(rank) for rank in ranks], backward=False, pairs=pairs)


def test_of_two_rings_one_that_leaves_a_rank_far_more_work_is_not_taken() -> None:
    """Zigzag of these documents: the busiest has 177 pairs by its queries, 248 by its keys."""
    tiling = Tiling(LAYOUTS["zigzag"](32, 2), Mask.causal(documents=(0, 7, 31, 32)))
    given = tiling, flat_grid(2), Shape(16, 8, 8, 64, 64, 2, 4), [0, 0]
    taken, *others = choose(BurstConfig(), *given).backward
    assert taken.schedule.pairs.max() == 177
    assert min(offer.cost.bottleneck for offer in others) < taken.cost.bottleneck
    asked = choose(BurstConfig(backward="query"), *given).backward[0]
    assert asked.schedule.pairs.max() == 248
    # Nor does its way decide what a direct exchange has to beat.
    tiling = Tiling(LAYOUTS["zigzag"](64, 4), Mask.causal(documents=(0, 11, 27, 45, 64)))
    shape = Shape(16, 8, 8, 64, 64, 2, 4)
    names = [
        o.schedule.name for o in choose(BurstConfig(), tiling, flat_grid(4), shape, "aaaa").backward
    ]
    assert names[0] == "kv direct exchange" and names.index("query ring") > 0


def test_by_bytes_a_direct_exchange_is_worth_its_calls_from_half_of_a_rings_on() -> None:
    """A window of 64 keys sends .50 of it, one of 96 .78."""
    shape, taken, of_ring = Shape(32, 8, 8, 64, 64, 2, 4), [], 458752
    for window in (63, 95):
        tiling = Tiling(LAYOUTS["zigzag"](256, 8), Mask.causal(window=window))
        offers = choose(BurstConfig(), tiling, flat_grid(8), shape, [0] * 8).forward
        taken.append((offers[0].schedule.name, offers[0].cost.bottleneck / of_ring))
    assert [name for name, _ in taken] == ["kv direct exchange", "kv ring"]
    assert taken[0][1] < 0.5 and offers[1].cost.bottleneck / 458752 == pytest.approx(
        0.777, abs=1e-3
    )


def test_short_documents_go_straight_where_nodes_are_sent_as_little_by_a_ring() -> None:
    """A ring sends another node what its ranks need, but takes whole shards around its own."""
    tokens, ranks = 2048, 16
    mask = Mask.causal(documents=(*range(0, tokens, 36), tokens))
    grid = Grid((tuple(range(8)), tuple(range(8, 16))))
    tiling, shape = Tiling(LAYOUTS["zigzag"](tokens, ranks), mask), Shape(128, 8, 8, 64, 64, 2, 4)
    taken, ring, *_ = choose(BurstConfig(), tiling, grid, shape, [0] * 8 + [1] * 8).forward
    assert (taken.schedule.name, ring.schedule.name) == ("kv direct exchange", "kv ring")
    assert taken.cost.bottleneck > 0.5 * ring.cost.bottleneck
    assert taken.cost.rank <= 0.5 * ring.cost.rank


def test_under_a_window_of_a_chunk_zigzag_exchanges_two_chunks() -> None:
    """At 8 ranks 2 chunks of a rank's 2 x 7 leave: a seventh of the causal ring."""
    layout, grid = LAYOUTS["zigzag"](16 * 64, 8), flat_grid(8)
    sizes = Shape(128, 8, 8, 64, 64, 2, 4).item_bytes()
    direct = Direct(Tiling(layout, Mask.causal(window=64)), grid)
    ring = Ring(Tiling(layout, Mask.causal()), grid)
    for rank in range(8):
        sent = bytes_sent(direct.forward(rank), sizes, layout.local_tokens)
        assert sent <= bytes_sent(ring.forward(rank), sizes) / 6
        peers = {send.peer for send in direct.forward(rank).sends}
        assert peers <= {rank - 1, rank + 1}


@pytest.mark.parametrize(
    ("masking", "backward"),
    in_turn(
        [Masking(window=6), Masking(documents=(0, 7, 20, 48)), Masking(window=3)], ["query", "kv"]
    ),
    ids=str,
)
def test_the_bytes_that_leave_are_the_plans(
    workers: WorkerPool, masking: Masking, backward: str
) -> None:
    case = Case(config={"backward": backward}, chunk=6, masking=masking, heads=(4, 2), dim=6)
    (answered,) = run_cases(workers, 4, [case])
    assert isinstance(case.choice(4).forward[0].schedule, Direct)
    assert [reply.sent for reply in answered.replies] == case.planned_bytes(4)


def lines_of(team: Team, maskings: Sequence[Masking]) -> list[str]:
    with logged() as lines:
        answer(team, [Case(chunk=8, masking=masking) for masking in maskings])
    return [line for line in lines if "FLOPs" in line]


def test_the_log_says_what_a_mask_saves(workers: WorkerPool) -> None:
    line = workers.run(4, lines_of, [Masking(window=3)])[0][0]
    assert "causal, window 3: a layer sends" in line
    assert "a rank forward by the kv direct exchange instead of" in line
    assert "backward the kv direct exchange" in line and "FLOPs max/mean 1.024" in line


def test_documents_are_logged_once_and_not_for_every_micro_batch(workers: WorkerPool) -> None:
    maskings = [Masking(documents=bounds) for bounds in ((0, 5, 32), (0, 7, 9, 32), (0, 32))]
    (line,) = workers.run(2, lines_of, maskings)[0]
    assert "2 packed sequences" in line


def test_passes_that_stop_elsewhere_are_logged_once_and_lines_do_not_grow_without_bound() -> None:
    """Under balanced layouts the border of a second pass moves with every micro-batch."""
    context, x = BurstContext.create(BurstConfig()), torch.zeros(1, 16, 2, 8)
    with logged() as lines:
        for stop in range(2, 14, 2):
            prepare(context, x, x, x, Mask.causal(documents=(0, stop, 16)), 1.0)
            early = replace(Mask.causal(documents=(0, 4, 16)), query_stop=stop)
            prepare(context, x, x, x, early, 1.0)
        assert len([line for line in lines if "FLOPs" in line or "nothing is sent" in line]) == 2
        for window in range(100):
            prepare(context, x, x, x, Mask.causal(window=window), 1.0)
    assert len(lines) < 70 and "says no more" in lines[-1]


def test_a_rank_whose_tokens_see_only_themselves_sends_nothing() -> None:
    layout, grid = LAYOUTS["contiguous"](32, 4), flat_grid(4)
    direct = Direct(Tiling(layout, Mask.causal(documents=(0, 8, 16, 24, 32))), grid)
    assert not any(direct.backward(rank).sends for rank in range(4))
    assert torch.tensor([len(tiles_of(direct.forward(rank))) for rank in range(4)]).eq(1).all()
