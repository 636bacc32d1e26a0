"""What needs memory at one time lies apart in it, until its last use. (fast tier)"""

import itertools
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_burst import Mask
from megatron_burst.attention.head_exchange import exchange_plan
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import Mesh
from megatron_burst.plans.schedules.plan import Item, Kind, Plan, Receive, Send
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import contiguous, zigzag
from megatron_burst.transport.arrangement import UNIT, Stay, arrange
from megatron_burst.transport.lowered import Form, Lowered
from tests.tier import examples

RANKS, LOCAL = 16, 32
NODES = Grid(tuple(itertools.batched(range(RANKS), 4)))
MASKS = {
    "causal": Mask.causal(),
    "window": Mask.causal(window=100),
    "documents": Mask.causal(documents=(0, 40, 45, 200, RANKS * LOCAL)),
}
STAYS = st.builds(
    lambda begin, steps, size: Stay(begin, begin + steps, size),
    *(st.integers(0, 12), st.integers(0, 6), st.integers(1, 2000)),
)


@examples(150)
@given(stays=st.lists(STAYS, max_size=20))
def test_what_stays_at_one_time_lies_apart(stays: list[Stay]) -> None:
    places, size = arrange(stays)
    ends = [place + stay.size for place, stay in zip(places, stays, strict=True)]
    assert all(place % 256 == 0 for place in places) and max(ends, default=0) <= size
    for a, b in itertools.combinations(range(len(stays)), 2):
        if stays[a].begin <= stays[b].end and stays[b].begin <= stays[a].end:
            assert ends[a] <= places[b] or ends[b] <= places[a]


def test_as_much_as_lies_there_at_the_most_where_all_is_of_one_size() -> None:
    stays = [Stay(begin, begin + 2, 512) for begin in range(9)]
    assert arrange(stays)[1] == 3 * 512 and arrange([]) == ([], 0)


type _At = tuple[int, int]  # begin and end in memory


def check(plan: Plan, lowered: Lowered) -> None:
    """Carry out a plan; what is read, sent or arrives must lie untouched for as long."""
    memory: dict[_At, Item] = {}
    found: dict[Item, _At] = {}  # blocks of others, and what was written
    landing, arriving = (defaultdict[int, list[tuple[Item, _At]]](list) for _ in range(2))

    def put(item: Item, at: _At) -> None:
        for other in [o for o in memory if o[0] < at[1] and at[0] < o[1]]:
            del memory[other]
        memory[at] = item

    for number, step in enumerate(plan.steps):
        for transfer in (*step.receives, *step.sends):
            if isinstance(transfer, Send) and lowered._is_in_place(transfer):
                continue
            place, item = lowered._place(number, transfer), transfer.item
            at = place.begin, place.end
            if isinstance(transfer, Receive):
                put(item, at)
                arriving[transfer.lands].append((item, at))
            elif item.kind.is_result or item not in found:
                assert item.kind.is_result or item.owner == plan.rank
                put(item, at)
                found[item] = at
            else:
                assert found[item] == at, "sent from where it is"
            landing[transfer.lands].append((item, at))
        read = {item for tiles in step.blocks for item in tiles.blocks if item.owner != plan.rank}
        used = [(item, found[item]) for item in read] + landing[number]
        assert [(item, at) for item, at in used if memory.get(at) != item] == [], number
        found |= {item: at for item, at in arriving[number] if not item.kind.is_result}


def forms(item: Item) -> list[Form]:
    """A few bytes a row, of gradients and query blocks more."""
    rows = item.packed.length if item.packed else LOCAL
    wide = 2 if item.kind.is_result else 1
    tensors = 4 if item.kind is Kind.QUERY else 2
    return [Form((1, rows, wide, 16), torch.float32)] * tensors


@pytest.mark.parametrize("grid", [flat_grid(RANKS), NODES], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_places_hold_for_all_schedules(mask: str, grid: Grid) -> None:
    tiling = Tiling(zigzag(LOCAL * RANKS, RANKS), MASKS[mask])
    schedules: list[Schedule] = [Ring(tiling, grid, sent) for sent in (Kind.KV, Kind.QUERY)]
    schedules += [Ring(tiling, grid, gather=True), Mesh(tiling, grid, 2, Kind.QUERY)]
    schedules += [Direct(tiling, grid)] if mask != "causal" else []
    for schedule, rank in itertools.product(schedules, (0, 5, RANKS - 1)):
        for plan in (schedule.forward(rank), schedule.backward(rank)):
            check(plan, Lowered("a pass", plan, forms, str))


IN_ZIGZAG = zigzag(LOCAL * RANKS, RANKS)
DIRECT = {
    "short": Tiling(IN_ZIGZAG, Mask.causal(window=LOCAL - 1)),
    "longer": Tiling(IN_ZIGZAG, Mask.causal(window=3 * LOCAL)),
    "long": Tiling(IN_ZIGZAG, Mask.causal(window=5 * LOCAL)),
    "whole blocks": Tiling(contiguous(LOCAL * RANKS, RANKS), Mask.causal(window=LOCAL)),
    "two documents": Tiling(IN_ZIGZAG, Mask.full(documents=(0, LOCAL * RANKS // 2, LOCAL * RANKS))),
}


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_exchange_takes_no_more_memory_than_is_said(name: str) -> None:
    """With the copies of own rows that are sent, which two others may share."""
    tiling = DIRECT[name]
    sizes = {kind: sum(4 * math.prod(f.shape) for f in forms(Item(kind, 0))) for kind in Kind}
    for sent in (Kind.KV, Kind.QUERY):
        direct = Direct(tiling, flat_grid(RANKS), sent)
        for backward in (False, True)[sent is Kind.QUERY :]:
            plans = [(direct.backward if backward else direct.forward)(n) for n in range(RANKS)]
            taken = max(Lowered("a pass", plan, forms, str).size for plan in plans)
            hops = [list(direct.messages(backward=backward)[0].hops(n)) for n in range(RANKS)]
            units = UNIT * (1 + backward) * max(map(len, hops))  # all in whole ones
            most = direct.memory(sizes, backward=backward) + units
            assert taken <= most and taken > 0.4 * most


def test_places_hold_for_an_all_to_all() -> None:
    plan = exchange_plan(1, RANKS)
    check(plan, lowered := Lowered("exchange", plan, forms, str))
    assert lowered.size == 2 * (RANKS - 1) * 2 * LOCAL * 64
