"""The time of one layer's attention: the plans of all ranks on a clock."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.cost import Shape
from megatron_burst.plans.latents import choose_keys
from megatron_burst.plans.layout import Layout, boundary
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.planning import Choice, choose
from megatron_burst.plans.schedule import Messages, Schedule
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.work import Work
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan.clock import Timed, duration
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.workload import Ring, Workload


class Pass(NamedTuple):
    """One forward or backward of one layer's attention, or several of them."""

    seconds: float = 0.0  # until the last rank is done
    kernels: float = 0.0  # of them, the tiles of the rank that has most of them
    sums: float = 0.0  # and what merges and adds their results
    sent: int = 0  # bytes, the most of any rank
    between: int = 0  # of them, the most that any rank sends to another node

    @property
    def exposed(self) -> float:
        """Seconds in which the rank with most to do waits for messages or is slowed by them."""
        return max(0.0, self.seconds - self.kernels - self.sums)

    @property
    def exposed_share(self) -> float:
        """Of the time."""
        return self.exposed / self.seconds


def together(*passes: Pass) -> Pass:
    """Add them up."""
    columns: Any = map(sum, zip(*passes, strict=True))
    return Pass(*columns)


def attention_passes(load: Workload) -> tuple[Pass, Pass, Pass]:
    """Return the forward, what of it is recomputed, and the backward of one layer."""
    fraction, heads = load.config.recompute_fraction, _exchange(load)

    def of(ring: Ring, *, backward: bool = False) -> Pass:
        choice, shape = chosen(ring)
        taken = (choice.backward if backward else choice.forward)[0]
        links = _Links(ring.nodes, shape, load.cluster, load.beside)
        seconds = _seconds(taken.schedule, links, backward=backward)
        chunk = Pass(*seconds, taken.cost.rank, taken.cost.nic)
        return together(*[chunk] * load.head_chunks, _chunked(load, backward=backward), heads)

    again = Pass()
    if (load.recompute and fraction is None) or "core_attn" in load.selective:
        again = of(load.ring)
    elif load.recompute and fraction:
        stop = boundary(load.ring.layout, fraction)
        again = of(replace(load.ring, mask=replace(load.ring.mask, query_stop=stop)))
    elif load.recompute:
        again = heads  # the results are saved, but heads and tokens change places again
    return of(load.ring), again, of(load.ring, backward=True)


@lru_cache(maxsize=64)
def chosen(ring: Ring) -> tuple[Choice, Shape]:
    """Return the schedules that training chooses, and the shape that travels.

    That has latents in multi-latent attention, where they are faster.
    """
    tiling, config = _tiling(ring.layout, ring.mask), ring.config
    limit = config.memory_limit(ring.card)

    def choose_for(shape: Shape) -> Choice:
        return choose(config, tiling, ring.grid, shape, ring.nodes, memory_limit=limit)

    heads = replace(ring.shape, latents=None)
    return choose_keys(choose_for, heads, ring.shape.latents, config)[:2]


@lru_cache(maxsize=32)
def _tiling(layout: Layout, mask: Mask) -> Tiling:
    """Rings that differ in what they send have the same tiles."""
    return Tiling(layout, mask)


@lru_cache(maxsize=16)
def buffers(ring: Ring) -> frozenset[tuple[Kind, ...]]:
    """Return the kinds of what ranks have of others in the backward: buffers, and sums.

    Ranks that send, receive and compute in the same steps have the same.
    """
    choice, shape = chosen(ring)
    schedule, sizes = choice.backward[0].schedule, shape.item_bytes()
    rows = [schedule.work(backward=True).pairs > 0]
    for messages in schedule.messages(backward=True):
        loads = messages.loads(sizes, ring.shape.tokens)
        for ends in (loads.sources, loads.targets):
            rows.append(np.zeros(ends.shape, bool))
            np.put_along_axis(rows[-1], ends, loads.sizes > 0, axis=1)
    alike = np.packbits(np.concatenate(rows), axis=0).T
    ranks = {steps.tobytes(): rank for rank, steps in enumerate(alike)}.values()
    plans = [schedule.backward(rank) for rank in ranks]
    return frozenset((*plan.most_buffered.elements(), *plan.most_sums.elements()) for plan in plans)


@lru_cache(maxsize=256)
def _seconds(schedule: Schedule, links: "_Links", *, backward: bool) -> tuple[float, float, float]:
    """Of all ranks, and of the one that computes most its kernels and its sums."""
    work, shape, machine = schedule.work(backward=backward), links.shape, links.cluster
    dims = shape.head_dim, shape.value_head_dim
    rate = machine.attention_rate(sum(dims) / 2, backward=backward)
    flops = attention_flops(1, shape.query_heads, *dims, backward=backward)
    local_tokens = schedule.tiling.local_tokens
    batch = shape.tokens // local_tokens
    # Tiles of a step share a call: one of what is seen whole, one of what is seen in part.
    rows = np.minimum(batch * work.query_rows, 2 * shape.tokens)
    work = Work(work.pairs * batch, rows, batch * work.key_rows, work.visitors)
    kernels = (work.pairs + machine.grain * work.query_rows) * flops / rate
    if shape.latents:  # K and V are made of what came, in the backward again, and gradients of them
        met = np.minimum(work.key_rows, shape.tokens) * (3 if backward else 1)
        kernels += 2 * met * shape.latents.weight / machine.linear_rate
    sums = machine.traffic * sum_bytes(work, shape, backward) / machine.memory_rate
    sizes = shape.item_bytes(backward=backward)
    messages = links.timed(schedule.messages(backward=backward), sizes, local_tokens)
    lands = (step for timed in messages for step in timed.loads.lands.tolist())
    computing = np.zeros((1 + max([len(kernels), *lands]), len(links.nodes)))
    computing[: len(kernels)] = kernels + sums + machine.step_seconds * (work.pairs > 0)
    computing += links.taken_from_computing(messages, len(computing))
    most = work.pairs.sum(axis=0).argmax()
    of_most = kernels[:, most].sum(), sums[:, most].sum()
    return duration(messages, computing), float(of_most[0]), float(of_most[1])


def sum_bytes(work: Work, shape: Shape, backward: bool) -> NDArray[np.int64]:
    """Return what is read and written to add the tiles' results to the sums: [step, rank]."""
    a_query, a_key, a_visitor = shape.added_bytes(backward=backward)
    return a_query * work.query_rows + a_key * work.key_rows + a_visitor * work.visitors


class _Links(NamedTuple):
    """The links of one ring, with those of the rings beside it on the same NICs."""

    nodes: tuple[int, ...]  # of each rank
    shape: Shape
    cluster: Cluster
    beside: int  # GPUs of a node that are in the same place of their rings

    def timed(
        self, messages: Iterable[Messages], sizes: Mapping[Kind, int], local_tokens: int
    ) -> list[Timed]:
        """Return the messages with the seconds that each takes."""
        machine = self.cluster
        node = np.array(self.nodes)
        loads = [each.loads(sizes, local_tokens) for each in messages]
        between = [node[each.sources] != node[each.targets] for each in loads]
        place = np.arange(len(node)) % self.nodes.count(0) * self.beside // machine.gpus_per_nic
        nic = node * (1 + place.max()) + place
        leaving = np.zeros(len(node), bool)  # who sends to other nodes
        for each, leaves in zip(loads, between, strict=True):
            leaving[each.sources[leaves & (each.sizes > 0)]] = True
        shared = min(self.beside, machine.gpus_per_nic) * np.bincount(nic, leaving)[nic]
        slower = shared / machine.nic_rate
        timed = []
        for each, far in zip(loads, between, strict=True):
            seconds = np.where(far, slower[each.sources], 1 / machine.within_rate) * each.sizes
            latency = np.where(far, machine.nic_latency, machine.within_latency)
            timed.append(Timed(each, far, seconds + latency * (each.sizes > 0)))
        return timed

    def taken_from_computing(self, messages: Iterable[Timed], steps: int) -> NDArray[np.float64]:
        """Return the seconds that messages take from the computing beside them: [step, rank]."""
        sending, receiving, copied = np.zeros((3, steps * len(self.nodes)))
        for loads, _, seconds in messages:
            step = loads.leaves[:, None] * len(self.nodes)
            sources, targets = (step + loads.sources).ravel(), (step + loads.targets).ravel()
            np.add.at(sending, sources, seconds.ravel())
            np.add.at(receiving, targets, seconds.ravel())
            np.add.at(copied, sources, loads.sizes.ravel() / self.cluster.copy_rate)
        taken = self.cluster.contention * np.maximum(sending, receiving) + copied
        return taken.reshape(steps, -1)


def _chunked(load: Workload, *, backward: bool) -> Pass:
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
    """The all-to-alls over heads of one pass: one step, in which nothing is computed.

    All of a tensor is read and written to be packed, and again to be unpacked. None but those of
    Ulysses leave a node.
    """
    size, machine = load.head_parallel, load.cluster
    if size == 1:
        return Pass()
    sent = load.ring.shape.exchange_bytes(size) * load.head_chunks
    across = sent * max(0, size - load.ranks_per_node) // (size - 1)
    links = (sent - across) / machine.within_rate, across * machine.gpus_per_nic / machine.nic_rate
    repacked = 4 * sent / (size - 1) * size
    seconds = max(links) + sent / machine.copy_rate + repacked / machine.memory_rate
    return Pass(seconds, sent=sent, between=across)
