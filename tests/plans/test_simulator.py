"""The simulator sees the faults planted in plans that are right, and names them. (fast tier)"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron_burst.plans.schedules.plan import (
    Channel,
    Item,
    Kind,
    Plan,
    Receive,
    Send,
    Step,
    Transfer,
)
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.simulator import PlanError, blocks_of, plans_of, simulate, tiles_of

FLAT = Grid(((0, 1, 2, 3),))
DOUBLE = Grid(((0, 1), (2, 3)))
PAIRS = 16 * 17 // 2
WITHIN, BETWEEN = Channel.READ_WITHIN, Channel.READ_BETWEEN

both_passes = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


def make_plans(backward: bool, grid: Grid = FLAT, gather: bool = False) -> list[Plan]:
    ring = Ring(Tiling(zigzag(16, 4), Mask.causal()), grid, chained=True, gather=gather)
    return plans_of(ring, backward)


def edit(plans: Sequence[Plan], rank: int, step: int, **changes: Any) -> list[Plan]:
    steps = list(plans[rank].steps)
    if "tiles" in changes:
        changes["blocks"] = tuple(b for tile in changes.pop("tiles") for b in blocks_of([tile]))
    steps[step] = replace(steps[step], **changes)
    return [replace(p, steps=tuple(steps)) if p.rank == rank else p for p in plans]


def assert_fails(
    plans: Sequence[Plan], message: str, *, backward: bool = False, pairs: int | None = None
) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(plans, backward=backward, pairs=pairs)


def without(ends: Sequence[Transfer], item: Item) -> tuple[Transfer, ...]:
    rest = tuple(end for end in ends if end.item != item)
    assert len(rest) == len(ends) - 1
    return rest


@both_passes
@pytest.mark.parametrize("grid", [FLAT, DOUBLE], ids=str)
@pytest.mark.parametrize("gather", [False, True], ids=["", "gather"])
def test_the_plans_are_right_before_anything_is_planted(
    backward: bool, grid: Grid, gather: bool
) -> None:
    simulate(make_plans(backward, grid, gather), backward=backward, pairs=PAIRS)


def test_a_dropped_send() -> None:
    plans = make_plans(False)
    message = "nobody can go on: rank 3, step 2 waits to receive kv of rank 0 from rank 2$"
    assert_fails(edit(plans, 2, 2, sends=()), message)


def test_a_dropped_send_whose_place_the_next_one_takes() -> None:
    plans = make_plans(True)
    sends = without(plans[2].steps[1].sends, Item(Kind.KV, 1))
    message = "rank 3, step 1: expects kv of rank 1 from rank 2, gets k"
    assert_fails(edit(plans, 2, 1, sends=sends), message, backward=True)


def test_a_receive_that_nobody_sends() -> None:
    plans = make_plans(False)
    extra = (*plans[2].steps[3].receives, Receive(Item(Kind.KV, 3), 1, WITHIN, 3))
    message = "nobody can go on: rank 2, step 3 waits to receive kv of rank 3 from rank 1$"
    assert_fails(edit(plans, 2, 3, receives=extra), message)


def test_a_send_that_nobody_takes() -> None:
    plans = make_plans(False)
    extra = (*plans[0].steps[0].sends, Send(Item(Kind.QUERY, 0), 2, WITHIN, 0))
    message = "nobody can go on: rank 0, step 0 waits to send query of rank 0 to rank 2;"
    assert_fails(edit(plans, 0, 0, sends=extra), message)


@pytest.mark.parametrize("lands", [1, 5], ids=["before it leaves", "after the end"])
def test_a_message_that_is_never_waited_for(lands: int) -> None:
    plans = make_plans(False)
    (send,) = plans[0].steps[2].sends
    plans = edit(plans, 0, 2, sends=(send._replace(lands=lands),))
    assert_fails(plans, f"rank 0, step 2: is to send kv of rank 2 .* step {lands}")


def test_two_gradients_in_another_order() -> None:
    plans = make_plans(True)
    (_, first), (second,) = (plans[1].steps[number].receives for number in (2, 3))
    plans = edit(plans, 1, 2, receives=(plans[1].steps[2].receives[0], second._replace(lands=2)))
    plans = edit(plans, 1, 3, receives=(first._replace(lands=3),))
    message = "rank 1, step 2: expects d_kv of rank 2 from rank 0, gets d_kv of rank 3"
    assert_fails(plans, message, backward=True)


@both_passes
def test_a_tile_that_is_computed_twice(backward: bool) -> None:
    plans = make_plans(backward)
    (tile,) = tiles_of(plans[2].steps[0])
    message = r"rank 2, step 2: computes Tile\(.*\), as does rank 2, step 0"
    tiles = (*tiles_of(plans[2].steps[2]), tile)
    assert_fails(edit(plans, 2, 2, tiles=tiles), message, backward=backward)


@both_passes
def test_a_tile_that_is_missing(backward: bool) -> None:
    plans = make_plans(backward)
    missing = sum(tile.pairs for tile in tiles_of(plans[2].steps[0]))
    message = f"the tiles have {PAIRS - missing} pairs of tokens, the mask {PAIRS}"
    assert_fails(edit(plans, 2, 0, tiles=()), message, backward=backward, pairs=PAIRS)


@both_passes
def test_a_tile_before_its_block_arrives(backward: bool) -> None:
    plans = make_plans(backward)
    early, late = plans[2].steps[:2]
    plans = edit(plans, 2, 0, tiles=(*tiles_of(early), *tiles_of(late)))
    plans = edit(plans, 2, 1, tiles=())
    message = "rank 2, step 0: computes with kv of rank 1, which it doe"
    assert_fails(plans, message, backward=backward)


def test_a_tile_after_its_gradient_has_left() -> None:
    plans = make_plans(True)
    late = (*tiles_of(plans[0].steps[3]), *tiles_of(plans[0].steps[2]))
    plans = edit(edit(plans, 0, 2, tiles=()), 0, 3, tiles=late)
    message = "rank 0, step 5: still has d_kv of rank 2 at the end"
    assert_fails(plans, message, backward=True, pairs=PAIRS)


def test_a_block_that_is_sent_but_not_there() -> None:
    sends = (Send(Item(Kind.KV, 3), 1, WITHIN, 0),)
    message = "rank 0, step 0: sends kv of rank 3, which it does not"
    assert_fails(edit(make_plans(False), 0, 0, sends=sends), message)


def test_a_gradient_that_is_sent_before_it_is_there() -> None:
    plans = make_plans(True)
    sends = (*plans[0].steps[1].sends, Send(Item(Kind.D_KV, 3), 1, Channel.GRADIENT_WITHIN, 1))
    message = "rank 0, step 1: sends d_kv of rank 3, which it does not"
    assert_fails(edit(plans, 0, 1, sends=sends), message, backward=True)


def test_a_sum_that_is_sent_as_what_one_tile_made() -> None:
    plans = make_plans(True)
    (send,) = (send for send in plans[0].steps[3].sends if send.item.kind is Kind.D_KV)
    sends = without(plans[0].steps[3].sends, send.item)
    partial = send._replace(item=send.item._replace(kind=Kind.PARTIAL_D_KV))
    message = "rank 0, step 3: sends as partial d_kv of rank 2 a sum of several tiles"
    assert_fails(edit(plans, 0, 3, sends=(*sends, partial)), message, backward=True)


@pytest.mark.parametrize("grid", [FLAT, DOUBLE], ids=str)
def test_a_gradient_that_is_not_sent_home(grid: Grid) -> None:
    plans = make_plans(True, grid)
    last = len(plans[0].steps) - 1
    (arrival,) = plans[0].steps[last].receives
    plans = edit(plans, 0, last, receives=())
    sends = without(plans[arrival.peer].steps[last].sends, Item(Kind.D_KV, 0))
    plans = edit(plans, arrival.peer, last, sends=sends)
    message = f"rank {arrival.peer}, step {last + 1}: still has d_kv of rank 0 at the end"
    assert_fails(plans, message, backward=True, pairs=PAIRS)


def test_two_ranks_that_wait_for_each_other() -> None:
    def takes_before_it_gives(rank: int) -> Plan:
        theirs, ours = Item(Kind.KV, 1 - rank), Item(Kind.KV, rank)
        take = Step(receives=(Receive(theirs, 1 - rank, WITHIN, 0),))
        return Plan(rank, (take, Step(sends=(Send(ours, 1 - rank, WITHIN, 1),))))

    message = (
        "nobody can go on: rank 0, step 0 waits to receive kv of rank 1 from rank 1; "
        "rank 1, step 0 waits to receive kv of rank 0 from rank 0"
    )
    assert_fails([takes_before_it_gives(0), takes_before_it_gives(1)], message)


# NCCL may carry out a rank's batches one by one: what two ranks post in opposite order hangs,
# though nobody waits for anything before all of it is posted.


@pytest.mark.parametrize("channel", [WITHIN, BETWEEN], ids=["one channel", "two channels"])
def test_batches_that_two_ranks_post_in_opposite_order(channel: Channel) -> None:
    def gives_before_it_takes(rank: int) -> Plan:
        out = channel if rank else WITHIN  # what rank 0 gives stays on the one channel
        back = WITHIN if rank else channel
        give = Step(sends=(Send(Item(Kind.KV, rank), 1 - rank, out, 1),))
        take = Step(receives=(Receive(Item(Kind.KV, 1 - rank), 1 - rank, back, 1),))
        return Plan(rank, (give, take))

    message = (
        "nobody can go on: "
        "rank 0, step 1 waits to send kv of rank 0 to rank 1, receive kv of rank 1 from rank 1;"
    )
    assert_fails([gives_before_it_takes(0), gives_before_it_takes(1)], message)


@pytest.mark.parametrize("gives_first", [False, True])
def test_of_one_step_the_batch_that_lands_first_goes_first(gives_first: bool) -> None:
    mine, theirs = Item(Kind.KV, 0), Item(Kind.KV, 1)
    step = Step(receives=(Receive(theirs, 1, WITHIN, 1),), sends=(Send(mine, 1, WITHIN, 0),))
    give = Step(sends=(Send(theirs, 0, WITHIN, 1),))
    take = Step(receives=(Receive(mine, 0, WITHIN, 1),))
    plans = [Plan(0, (step, Step())), Plan(1, (give, take) if gives_first else (take, give))]
    if gives_first:
        assert_fails(plans, "rank 0, step 0 waits to send kv of rank 0 to rank 1")
    else:
        simulate(plans, backward=False)


def test_batches_of_one_step_that_land_apart_do_not_go_together() -> None:
    def both_at_once(rank: int) -> Plan:
        lands = (0, 1) if rank else (1, 0)  # of kv of rank 0 and of rank 1
        ours, theirs = Item(Kind.KV, rank), Item(Kind.KV, 1 - rank)
        step = Step(
            receives=(Receive(theirs, 1 - rank, WITHIN, lands[1 - rank]),),
            sends=(Send(ours, 1 - rank, WITHIN, lands[rank]),),
        )
        return Plan(rank, (step, Step()))

    assert_fails([both_at_once(0), both_at_once(1)], "nobody can go on: rank 0, step 0 waits to")
