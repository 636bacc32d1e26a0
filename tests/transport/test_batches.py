"""No group of NCCL gets more operations than it bears, counted on 64 ranks. (fast tier)"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_burst import Mask
from megatron_burst.attention.head_exchange import exchange_plan
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import Mesh
from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Plan, Receive, Send
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.transport.comm import Block, Communicator, Transfers

RANKS, LOCAL, NCCL_BEARS = 64, 16, 256
NODES = Grid(tuple(itertools.batched(range(RANKS), 8)))
type Operations = list[tuple[str, int]]  # what is done with which peer


def stripes(blocks: int) -> torch.Tensor:
    """Every second block of keys, so that what a rank needs of another is as many pieces."""
    return (torch.arange(blocks) % 2 == 0).repeat(blocks, 1)


MASKS = {
    "causal": Mask.causal(),
    "window": Mask.causal(window=100),
    "blocks": Mask.full(block_table=stripes(4 * RANKS)),
    "documents": Mask.causal(documents=range(0, LOCAL * RANKS + 1, 32)),
}
TENSORS = 4  # the most of an item: q, dO, LSE and delta


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operations]]:
    """What goes to NCCL together, in order."""
    found: list[Operations] = []

    class Through:
        def wait(self) -> None:
            pass

    def batch(operations: list[dist.P2POp]) -> list[Any]:
        found.append([(op.op.__name__, op.group_peer) for op in operations])
        return [Through()]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield found
    dist.destroy_process_group()


def carry_out(plan: Plan, tensors: int) -> None:
    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator(range(RANKS), dict.fromkeys(Channel, world), 60.0)
    communicator._watchdog = None
    block = tuple(torch.zeros(1, LOCAL, 1, 1) for _ in range(tensors))
    transfers = Transfers(communicator, "forward", plan, lambda _: block)

    class Outgoing(dict[Item, Block]):
        def __missing__(self, _: Item) -> Block:
            return block

    for number, step in enumerate(plan.steps):
        transfers.post(number, step, Outgoing())
        transfers.land(number)


def messages(transfers: Iterable[Send | Receive]) -> int:
    """How many tensors are moved."""
    return TENSORS * len([*transfers])


@pytest.mark.parametrize("grid", [flat_grid(RANKS), NODES], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_rings_meshes_and_direct_exchanges(
    batches: list[Operations], mask: str, grid: Grid
) -> None:
    tiling = Tiling(zigzag(LOCAL * RANKS, RANKS), MASKS[mask])
    schedules: list[Schedule] = [Ring(tiling, grid, sent) for sent in (Kind.KV, Kind.QUERY)]
    schedules += [Ring(tiling, grid, gather=True), Mesh(tiling, grid, 4, Kind.QUERY)]
    schedules += [Direct(tiling, grid)] if mask != "causal" else []
    for schedule in schedules:
        for plan in (schedule.forward(9), schedule.backward(9)):
            before = len(batches)
            carry_out(plan, TENSORS)
            carried = Counter(way for batch in batches[before:] for way, _ in batch)
            expected = Counter(isend=messages(plan.sends), irecv=messages(plan.receives))
            assert carried == expected, "all, and once"
    assert 2 * TENSORS <= max(map(len, batches)) <= NCCL_BEARS


def test_an_all_to_all_over_the_heads(batches: list[Operations]) -> None:
    carry_out(exchange_plan(9, RANKS), 3)  # q, k and v
    assert sum(map(len, batches)) == 2 * 3 * (RANKS - 1)
    assert max(map(len, batches)) <= NCCL_BEARS
