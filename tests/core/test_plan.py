"""Plans of up to 12 ranks, and a simulator that sees the faults planted in them. (fast tier)"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_burst.cost import imbalance, pairs_computed
from megatron_burst.layout import Interval, Layout, contiguous, zigzag
from megatron_burst.mask import Mask, Relation
from megatron_burst.plan import (
    Item,
    Kind,
    Plan,
    Step,
    Transfer,
    blocks_of_tile,
    flat_kv_backward,
    flat_ring_forward,
)
from megatron_burst.simulator import PlanError, simulate
from tests.oracle import visible_pairs

type Planner = Callable[[Layout, Mask, int], Plan]

CHUNK = 2
LAYOUTS = {"zigzag": zigzag, "contiguous": contiguous}
MASKS = {"causal": Mask.causal(), "full": Mask.full()}
PLANNERS: dict[str, Planner] = {"forward": flat_ring_forward, "backward": flat_kv_backward}
EVERY_CASE = pytest.mark.parametrize(
    ("planner", "layout", "mask", "ranks"),
    [
        pytest.param(p, LAYOUTS[name](2 * n * CHUNK, n), MASKS[m], n, id=f"{p}-{name}-{m}-{n}")
        for p, name, m, n in itertools.product(PLANNERS, LAYOUTS, MASKS, range(1, 13))
    ],
)


def make_plans(planner: str, layout: Layout, mask: Mask) -> list[Plan]:
    return [PLANNERS[planner](layout, mask, rank) for rank in range(layout.ranks)]


def times_computed(plans: Sequence[Plan], layout: Layout) -> Tensor:
    """How often the plans compute each (query position, key position)."""
    times = torch.zeros((layout.ranks * layout.local_tokens,) * 2, dtype=torch.int64)
    for plan in plans:
        for tile in plan.tiles:
            queries = layout.positions(tile.query_owner)[tile.query_rows.rows]
            keys = layout.positions(tile.key_owner)[tile.key_rows.rows]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int64)
            if tile.relation is Relation.CAUSAL:
                assert len(queries) == len(keys)
                pairs = pairs.tril()
            assert tile.pairs == pairs.sum()
            times[queries[:, None], keys[None, :]] += pairs
    return times


def sends(plan: Plan, kind: Kind) -> list[Transfer]:
    return [t for step in plan.steps for t in step.sends if t.item.kind is kind]


def receives(plan: Plan, kind: Kind) -> list[Transfer]:
    return [t for step in plan.steps for t in step.receives if t.item.kind is kind]


def owners_read(plan: Plan) -> set[int]:
    return {tile.key_owner for tile in plan.tiles}


@EVERY_CASE
def test_every_visible_pair_is_computed_once_and_the_plans_fit_together(
    planner: str, layout: Layout, mask: Mask, ranks: int
) -> None:
    plans = make_plans(planner, layout, mask)
    pairs = mask.pairs(ranks * layout.local_tokens)
    simulate(plans, backward=planner == "backward", pairs=pairs)
    expected = visible_pairs(ranks * layout.local_tokens, mask.is_causal)
    assert torch.equal(times_computed(plans, layout), expected.long())
    assert sum(map(pairs_computed, plans)) == pairs
    assert all(tile.query_owner == plan.rank for plan in plans for tile in plan.tiles)


@EVERY_CASE
def test_only_what_somebody_needs_is_sent(
    planner: str, layout: Layout, mask: Mask, ranks: int
) -> None:
    plans = make_plans(planner, layout, mask)
    for owner in range(ranks):
        # How far along the ring the ranks are that read the owner's block.
        distances = [k for k in range(1, ranks) if owner in owners_read(plans[(owner + k) % ranks])]
        hops = {
            kind: sum(t.item == Item(kind, owner) for plan in plans for t in sends(plan, kind))
            for kind in (Kind.KV, Kind.D_KV)
        }
        way_home = ranks - min(distances) if planner == "backward" and distances else 0
        assert hops == {Kind.KV: max(distances, default=0), Kind.D_KV: way_home}
    for plan in plans:
        assert all(step.sends or step.receives or step.tiles for step in plan.steps)


@pytest.mark.parametrize("ranks", range(1, 13))
@pytest.mark.parametrize(
    ("name", "mask"), [("zigzag", "causal"), ("zigzag", "full"), ("contiguous", "full")]
)
def test_every_rank_sends_p_minus_1_blocks_and_p_minus_1_gradients(
    name: str, mask: str, ranks: int
) -> None:
    layout = LAYOUTS[name](2 * ranks * CHUNK, ranks)
    for rank in range(ranks):
        forward = flat_ring_forward(layout, MASKS[mask], rank)
        backward = flat_kv_backward(layout, MASKS[mask], rank)
        counts = [
            len(ends(plan, kind))
            for ends in (sends, receives)
            for plan in (forward, backward)
            for kind in (Kind.KV, Kind.D_KV)
        ]
        assert counts == [ranks - 1, 0, ranks - 1, ranks - 1] * 2


@pytest.mark.parametrize("ranks", range(2, 13))
def test_under_a_contiguous_causal_split_no_block_goes_to_an_earlier_rank(ranks: int) -> None:
    layout = contiguous(2 * ranks, ranks)
    for plan in make_plans("forward", layout, Mask.causal()):
        carried = [t.item.owner for t in sends(plan, Kind.KV)]
        wanted = range(plan.rank + 1) if plan.rank < ranks - 1 else ()
        assert sorted(carried) == list(wanted)


@EVERY_CASE
def test_a_released_block_is_not_used_again_and_nothing_is_kept(
    planner: str, layout: Layout, mask: Mask, ranks: int
) -> None:
    for plan in make_plans(planner, layout, mask):
        released: list[Item] = []
        for step in plan.steps:
            moved = [t.item for t in (*step.sends, *step.receives) if not t.item.kind.is_gradient]
            used = {*moved, *(item for tile in step.tiles for item in blocks_of_tile(tile))}
            assert used.isdisjoint(released)
            released += step.release
        held = {Item(Kind.QUERY, plan.rank), Item(Kind.KV, plan.rank)}
        assert Counter(released) == Counter(held | {t.item for t in receives(plan, Kind.KV)})


@pytest.mark.parametrize("ranks", range(1, 13))
def test_zigzag_shares_the_work_of_a_causal_mask_evenly(ranks: int) -> None:
    layout = zigzag(2 * ranks * 8, ranks)
    assert imbalance(layout, Mask.causal()) <= 1.05
    for planner in PLANNERS:
        pairs = [pairs_computed(plan) for plan in make_plans(planner, layout, Mask.causal())]
        assert max(pairs) * ranks <= 1.05 * sum(pairs)


def test_contiguous_does_not() -> None:
    assert imbalance(contiguous(128, 8), Mask.causal()) > 1.8


def test_a_rank_computes_its_own_causal_square_in_one_tile() -> None:
    first = flat_ring_forward(zigzag(32, 4), Mask.causal(), 1).steps[0]
    (tile,) = first.tiles
    assert (tile.relation, tile.query_rows, tile.key_rows) == (
        Relation.CAUSAL,
        Interval(0, 8),
        Interval(0, 8),
    )


# The simulator has to see the faults below, planted in plans that are right.


def edit(plans: Sequence[Plan], rank: int, step: int, **changes: object) -> list[Plan]:
    steps = list(plans[rank].steps)
    steps[step] = replace(steps[step], **changes)
    return [replace(p, steps=tuple(steps)) if p.rank == rank else p for p in plans]


def plans_of_four(planner: str) -> list[Plan]:
    return make_plans(planner, zigzag(16, 4), Mask.causal())


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_simulator_sees_a_dropped_send(planner: str) -> None:
    plans = plans_of_four(planner)
    with pytest.raises(PlanError, match=r"rank 3[ ,].*step 1"):
        simulate(edit(plans, 2, 1, sends=()), backward=planner == "backward")


def test_the_simulator_sees_a_receive_that_nobody_sends() -> None:
    plans = plans_of_four("forward")
    extra = (*plans[2].steps[3].receives, Transfer(Item(Kind.KV, 3), 1))
    with pytest.raises(PlanError, match=r"nobody can go on: rank 2 in step 3"):
        simulate(edit(plans, 2, 3, receives=extra), backward=False)


def test_the_simulator_sees_a_send_that_nobody_takes() -> None:
    plans = plans_of_four("forward")
    extra = (*plans[0].steps[0].sends, Transfer(Item(Kind.QUERY, 0), 2))
    with pytest.raises(PlanError, match="rank 0 sends query of rank 0 that rank 2 never takes"):
        simulate(edit(plans, 0, 0, sends=extra), backward=False)


@pytest.mark.parametrize("end", ["sends", "receives"])
def test_the_simulator_sees_two_messages_in_another_order(end: str) -> None:
    plans = plans_of_four("backward")
    step = next(i for i, s in enumerate(plans[1].steps) if len(s.sends) == len(s.receives) == 2)
    swapped = tuple(reversed(getattr(plans[1].steps[step], end)))
    with pytest.raises(PlanError, match=r"expects .* from \d, gets "):
        simulate(edit(plans, 1, step, **{end: swapped}), backward=True)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_simulator_sees_a_tile_that_is_computed_twice(planner: str) -> None:
    plans = plans_of_four(planner)
    tiles = plans[2].steps[1].tiles
    with pytest.raises(PlanError):
        simulate(edit(plans, 2, 1, tiles=(*tiles, tiles[0])), backward=planner == "backward")


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_simulator_sees_a_tile_that_is_missing(planner: str) -> None:
    plans = plans_of_four(planner)
    pairs = sum(map(pairs_computed, plans))
    with pytest.raises(PlanError, match=f"the mask {pairs}"):
        simulate(edit(plans, 2, 0, tiles=()), backward=planner == "backward", pairs=pairs)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_simulator_sees_a_tile_before_its_block_arrives(planner: str) -> None:
    plans = plans_of_four(planner)
    early, late = plans[2].steps[:2]
    plans = edit(plans, 2, 0, tiles=early.tiles + late.tiles)
    plans = edit(plans, 2, 1, tiles=())
    with pytest.raises(PlanError, match="rank 2, step 0: computes with kv of rank 1, which it doe"):
        simulate(plans, backward=planner == "backward")


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_simulator_sees_a_block_released_too_early(planner: str) -> None:
    plans = plans_of_four(planner)
    with pytest.raises(PlanError, match="rank 2, step 1: computes with query of rank 2, which"):
        simulate(edit(plans, 2, 0, release=(Item(Kind.QUERY, 2),)), backward=planner == "backward")


def test_the_simulator_sees_a_block_that_is_sent_but_not_there() -> None:
    plans = plans_of_four("forward")
    with pytest.raises(PlanError, match="rank 0, step 0: sends no kv of rank 3"):
        simulate(
            edit(plans, 0, 0, sends=(Transfer(Item(Kind.KV, 3), 1),)),
            backward=False,
        )


def test_the_simulator_sees_a_gradient_that_is_not_sent_home() -> None:
    plans = plans_of_four("backward")
    home = Transfer(Item(Kind.D_KV, 0), 0)  # the last hop of the gradient of rank 0, from 3 to 0
    step = next(i for i, s in enumerate(plans[3].steps) if home in s.sends)
    arrival = next(i for i, s in enumerate(plans[0].steps) if home._replace(peer=3) in s.receives)
    plans = edit(plans, 3, step, sends=tuple(t for t in plans[3].steps[step].sends if t != home))
    plans = edit(plans, 0, arrival, receives=())
    with pytest.raises(PlanError, match="rank 3, step 5: still has d_kv of rank 0 at the end"):
        simulate(plans, backward=True)


def test_the_simulator_sees_two_ranks_that_wait_for_each_other() -> None:
    def takes_before_it_gives(rank: int) -> Plan:
        peer = 1 - rank
        return Plan(
            rank,
            (
                Step(receives=(Transfer(Item(Kind.KV, peer), peer),)),
                Step(sends=(Transfer(Item(Kind.KV, rank), peer),)),
            ),
        )

    with pytest.raises(PlanError, match="nobody can go on: rank 0 in step 0, rank 1 in step 0"):
        simulate([takes_before_it_gives(0), takes_before_it_gives(1)], backward=False)
