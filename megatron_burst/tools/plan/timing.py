"""The time of one layer's attention: the plans of all ranks on a clock."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.kv_or_latents import choose_kv
from megatron_burst.plans.choice.planning import Choice
from megatron_burst.plans.choice.timing import Links, exchange, pass_time
from megatron_burst.plans.schedules.plan import Item, Kind, Plan
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.visibility.layout import Layout, boundary
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.plan.communicators import reached, reached_by_heads
from megatron_burst.tools.plan.workload import Ring, Workload
from megatron_burst.transport.arrangement import UNIT, Stay, arrange
from megatron_burst.transport.lowered import Lowered


class Pass(NamedTuple):
    """One forward or backward of one layer's attention, or several of them."""

    device: float = 0.0  # seconds until the last rank is done
    host: float = 0.0  # of the host, which runs ahead
    kernels: float = 0.0  # of them, the tiles of the rank that has most of them
    sums: float = 0.0  # and what merges and adds their results
    sent: int = 0  # bytes, the most of any rank
    between: int = 0  # of them, the most that any rank sends to another node

    @property
    def seconds(self) -> float:
        """Those of the devices, or of a host that is slower."""
        return max(self.device, self.host)

    @property
    def exposed(self) -> float:
        """Seconds in which who has most to do waits for messages, or is slowed."""
        return max(0.0, self.device - self.kernels - self.sums)

    @property
    def exposed_share(self) -> float:
        """Of the time of the devices."""
        return self.exposed / self.device


def together(*passes: Pass) -> Pass:
    """Add them up."""
    columns: Any = map(sum, zip(*passes, strict=True))
    return Pass(*columns)


def attention_passes(load: Workload) -> tuple[Pass, Pass, Pass]:
    """Return the forward, what of it is recomputed, and the backward of one layer."""
    fraction, heads = load.config.recompute_fraction, _exchange(load)

    def of(ring: Ring, *, backward: bool = False) -> Pass:
        chunks = [_chunk(ring, backward=backward)] * load.head_chunks
        return together(*chunks, _cut_and_joined(load, backward=backward), heads)

    if not load.repeats_attention:
        again = Pass()
    elif fraction is None:
        again = of(load.ring)
    elif fraction:
        stop = boundary(load.ring.layout, fraction)
        early = None if stop == load.ring.layout.tokens else stop
        again = of(replace(load.ring, mask=replace(load.ring.mask, query_stop=early)))
    else:
        again = heads  # the results are saved, but heads and tokens change places again
    return of(load.ring), again, of(load.ring, backward=True)


@lru_cache(maxsize=64)
def chosen(ring: Ring) -> tuple[Choice, Shape]:
    """Return the schedules that training chooses, and the shape that travels.

    That has latents in multi-latent attention, where they are faster.
    """
    links = Links(ring.nodes, replace(ring.shape, latents=None), ring.machine, ring.beside)
    given = ring.config, _tiling(ring.layout, ring.mask), ring.grid, links
    return choose_kv(*given, ring.shape.latents, ring.config.memory_limit(ring.machine.memory))[:2]


@lru_cache(maxsize=128)
def _chunk(ring: Ring, *, backward: bool) -> Pass:
    """A pass of one chunk of the heads by the schedule that is chosen, on NCCL's channels."""
    choice, shape = chosen(ring)
    taken = (choice.backward if backward else choice.forward)[0]
    machine, time = reached(ring, taken.schedule, shape, backward=backward), taken.time
    if time is None or machine != ring.machine:
        links = Links(ring.nodes, shape, machine, ring.beside)
        time = pass_time(taken.schedule, links, backward=backward)
    return Pass(*time, taken.cost.rank, taken.cost.nic)


@lru_cache(maxsize=32)
def _tiling(layout: Layout, mask: Mask) -> Tiling:
    """Rings that differ in what they send have the same tiles."""
    return Tiling(layout, mask)


@lru_cache(maxsize=16)
def buffer_bytes(ring: Ring) -> int:
    """Return what a rank has of others in the backward at the most: buffers, and sums.

    Ranks that send, receive and compute in the same steps have the same.
    """
    choice, shape = chosen(ring)
    schedule, sizes = choice.backward[0].schedule, shape.item_bytes()
    busy = [schedule.work(backward=True).pairs > 0]
    for messages in schedule.messages(backward=True):
        loads = messages.loads(sizes, ring.shape.tokens)
        for ends in (loads.sources, loads.targets):
            busy.append(np.zeros(ends.shape, bool))
            np.put_along_axis(busy[-1], ends, loads.sizes > 0, axis=1)
    alike = np.packbits(np.concatenate(busy), axis=0).T
    ranks = {steps.tobytes(): rank for rank, steps in enumerate(alike)}.values()
    plans = [schedule.backward(rank) for rank in ranks]
    held = (most_arrived(plan) + _most_sums(plan) for plan in plans)
    return max(sum(sizes[kind] * count for kind, count in each.items()) for each in held)


def most_arrived(plan: Plan) -> Counter[Kind]:
    """Return of each kind how many messages that arrive need memory at a time, at the most."""
    stays = defaultdict[Kind, list[Stay]](list)
    for kind, (begin, end, _) in Lowered("", plan, lambda _: [], str).arrivals:
        stays[kind].append(Stay(begin, end, UNIT))
    return Counter({kind: arrange(of_kind)[1] // UNIT for kind, of_kind in stays.items()})


def _most_sums(plan: Plan) -> Counter[Kind]:
    """Return of each kind how many of others' results arrivals are being added to, at the most."""
    begun: dict[Item, int] = {}
    there: dict[Kind, Counter[int]] = defaultdict(Counter)  # by step
    for step in plan.steps:
        for send in step.sends:
            steps = range(begun.pop(send.item.sum, send.lands) + 1, send.lands + 1)
            there[send.item.kind].update(steps)
        for receive in step.receives:
            if receive.item.kind.is_result and receive.item.owner != plan.rank:
                begun.setdefault(receive.item.sum, receive.lands)
    return Counter({kind: max(by_step.values(), default=0) for kind, by_step in there.items()})


def _cut_and_joined(load: Workload, *, backward: bool) -> Pass:
    """The copies of a pass that cuts its heads in chunks: of what it reads, and what it returns."""
    if load.head_chunks == 1:
        return Pass()
    shape = load.ring.shape
    output = shape.query_heads * shape.value_head_dim
    inputs = shape.query_heads * shape.head_dim
    inputs += shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    numbers = 2 * (inputs + output) if backward else inputs + output
    copied = load.head_chunks * shape.tokens * shape.element_bytes * numbers
    seconds = 2 * copied / load.cluster.memory_rate
    return Pass(seconds, sums=seconds)


def _exchange(load: Workload) -> Pass:
    """The all-to-alls over heads of one pass; those of chunks are as many bytes in all."""
    shape, chunks = load.ring.shape, load.head_chunks
    one = exchange(shape, load.head_parallel, load.ranks_per_node, reached_by_heads(load.ring))
    return together(*[Pass(one.device, one.host, 0.0, 0.0, one.sent, one.between)] * chunks)
