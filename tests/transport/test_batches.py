"""No group of NCCL gets more operations than it bears, counted on 64 ranks. (fast tier)"""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_burst import Mask
from megatron_burst.attention.head_exchange import exchange_plan
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import Mesh
from megatron_burst.plans.schedules.plan import Channel, Kind, Plan
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.transport import comm
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.lowered import forms_of

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
CPU = torch.device("cpu")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Operations]]:
    """What goes to NCCL together, in order."""
    found: list[Operations] = []

    class Through:
        def wait(self) -> None:
            pass

    def post(_: dist.ProcessGroup, calls: Any) -> list[Any]:
        found.append([(call.__name__, peer) for call, _, peer in calls])
        return [Through()]

    monkeypatch.setattr(comm, "post_together", post)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield found
    dist.destroy_process_group()


def carry_out(plan: Plan) -> None:
    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator(range(RANKS), dict.fromkeys(Channel, world), 60.0)
    communicator._watchdog = None
    block = tuple(torch.zeros(1, LOCAL, 1, 1) for _ in range(2))
    lowered = communicator.lower("forward", plan, lambda _: forms_of(block))
    with communicator.transfers(lowered, dict.fromkeys(Kind, block), CPU) as transfers:
        for number in range(len(plan.steps)):
            transfers.post(number)
            transfers.land(number)


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
            carry_out(plan)
            carried = Counter(way for batch in batches[before:] for way, _ in batch)
            assert carried == Counter(send=len(plan.sends), recv=len(plan.receives)), "each once"
    assert 2 <= max(map(len, batches)) <= NCCL_BEARS


def test_an_all_to_all_over_the_heads(batches: list[Operations]) -> None:
    carry_out(exchange_plan(9, RANKS))
    assert sum(map(len, batches)) == 2 * (RANKS - 1)
    assert max(map(len, batches)) <= NCCL_BEARS


@pytest.mark.usefixtures("batches")
def test_messages_follow_their_memory_where_it_lies_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU they are aliases, which are kept for as long as it lies where it lay."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    received: list[torch.Tensor] = []

    def post(_: dist.ProcessGroup, calls: Any) -> list[Any]:
        received.extend(t for call, (t,), _ in calls if call.__name__ == "recv")
        return []

    monkeypatch.setattr(comm, "post_together", post)
    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator(range(RANKS), dict.fromkeys(Channel, world), 60.0)
    block = tuple(torch.zeros(1, LOCAL, 64, 64) for _ in range(2))
    plan = Ring(Tiling(zigzag(LOCAL * RANKS, RANKS), Mask.causal()), NODES).forward(9)
    lowered = communicator.lower("forward", plan, lambda _: forms_of(block))
    places, between = set(), []
    for _ in range(3):
        with communicator.transfers(lowered, dict.fromkeys(Kind, block), CPU) as transfers:
            for step in (0, 1):  # what comes first is sent on: a batch that lies in that memory
                received.clear()
                transfers.post(step)
                (_, landed), *_ = transfers.land(step)
                assert received[0].data_ptr() == landed[0].data_ptr()
            places.add(landed[0].data_ptr())
        between.append(torch.empty(lowered.size, dtype=torch.uint8))  # where it lay
    assert len(places) > 1, "it did lie elsewhere"


@pytest.mark.parametrize("wraps", [False, True])
def test_what_can_be_posted_together_is_as_torchs_own_batches_do(
    wraps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls in the same order, with the tag of `P2POp`."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    told: list[tuple[Any, ...]] = []
    try:
        group, x = dist.new_group([0, 1]), torch.ones(2)
        inner = SimpleNamespace(supports_coalescing=True)
        found = SimpleNamespace(supports_coalescing=False, wrapped_pg=inner) if wraps else inner
        monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *_: found)
        for name in ("_start_coalescing", "_end_coalescing", "send", "recv"):
            noted = partial(lambda name, _, *given: told.append((name, *given)), name)
            monkeypatch.setattr(dist.ProcessGroup, name, partialmethod(noted))
        comm.post_together(group, [(group.recv, [x], 1), (group.send, [x], 1)])
        ours, told[:] = [*told], []
        if not wraps:
            one = {"tensor": x, "group": group, "group_peer": 1}
            dist.batch_isend_irecv([dist.P2POp(op, **one) for op in (dist.irecv, dist.isend)])
            assert [str(each) for each in ours] == [str(each) for each in told]
        assert [name for name, *_ in ours] == [
            "_start_coalescing",
            "recv",
            "send",
            "_end_coalescing",
        ]
    finally:
        dist.destroy_process_group()
