"""The time of a training step: attention by its plans on a clock, all else by FLOPs and bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.cost import Shape, visible_pairs
from megatron_burst.plans.layout import Layout, boundary
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.planning import Choice, choose
from megatron_burst.plans.schedule import Messages, Schedule
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.work import Work
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan.clock import Timed, duration
from megatron_burst.tools.plan.workload import Cluster, Ring, Workload

_SUM_BYTES = 4  # of an element of a sum


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


def _together(*passes: Pass) -> Pass:
    columns: Any = map(sum, zip(*passes, strict=True))
    return Pass(*columns)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a step."""

    attention: Pass  # all passes of a layer
    seconds: float
    tokens_per_gpu: float  # a second
    mfu: float


def predict(load: Workload) -> Prediction:
    """Predict a step; see the fields of the result."""
    attention = _together(*attention_passes(load))
    per_gpu = load.sequences / load.data
    layers = load.model.layers * per_gpu
    computed = layers * attention.seconds + per_gpu * linear_flops(load) / load.cluster.linear_rate
    tensor = layers * _tensor_parallel_seconds(load)
    seconds = computed + tensor + weights_seconds(load, computed)
    rate = load.sequences * load.tokens / load.gpus / seconds
    return Prediction(
        attention, seconds, rate, rate * model_flops(load) / load.tokens / load.cluster.peak
    )


def model_flops(load: Workload) -> float:
    """Return the FLOPs of a sequence that MFU counts: 3 x forward, visible pairs, no recompute."""
    return load.model.step_flops(load.tokens, visible_pairs(load.ring.mask, load.tokens))


def linear_flops(load: Workload) -> float:
    """Return the FLOPs of one GPU's matrix products for a sequence."""
    model, tokens = load.model, load.local_tokens / load.tensor
    layers = 2 * tokens * model.layers * model.layer_parameters * (4 if load.recompute else 3)
    of_head = load.head_products if load.chunked_loss else 3
    return layers + 2 * tokens * model.head_parameters * of_head


def attention_passes(load: Workload) -> tuple[Pass, Pass, Pass]:
    """Return the forward, what of it is recomputed, and the backward of one layer."""
    fraction, heads = load.config.recompute_fraction, _exchange(load)

    def of(ring: Ring, *, backward: bool = False) -> Pass:
        beside = load.beside
        return _together(_on_clock(ring, load.cluster, beside, backward=backward), heads)

    again = Pass()
    if load.recompute and fraction is None:
        again = of(load.ring)
    elif load.recompute and fraction:
        stop = boundary(load.ring.layout, fraction)
        again = of(replace(load.ring, mask=replace(load.ring.mask, query_stop=stop)))
    elif load.recompute:
        again = heads  # the results are saved, but heads and tokens change places again
    return of(load.ring), again, of(load.ring, backward=True)


@lru_cache(maxsize=64)
def choice_of(ring: Ring) -> Choice:
    """Return the schedules that training chooses."""
    tiling = _tiling(ring.layout, ring.mask)
    limit = ring.config.memory_limit(ring.card)
    return choose(ring.config, tiling, ring.grid, ring.shape, ring.nodes, memory_limit=limit)


@lru_cache(maxsize=32)
def _tiling(layout: Layout, mask: Mask) -> Tiling:
    """Rings that differ in what they send have the same tiles."""
    return Tiling(layout, mask)


@lru_cache(maxsize=16)
def buffers(ring: Ring) -> frozenset[tuple[Kind, ...]]:
    """Return the kinds of what ranks have of others in the backward: buffers, and sums.

    Ranks that send, receive and compute in the same steps have the same.
    """
    schedule, sizes = choice_of(ring).backward[0].schedule, ring.shape.item_bytes()
    rows = [schedule.work(backward=True).pairs > 0]
    for messages in schedule.messages(backward=True):
        loads = messages.loads(sizes, ring.shape.tokens)
        for ends in (loads.sources, loads.targets):
            rows.append(np.zeros(ends.shape, bool))
            np.put_along_axis(rows[-1], ends, loads.sizes > 0, axis=1)
    alike = np.packbits(np.concatenate(rows), axis=0).T
    ranks = {steps.tobytes(): rank for rank, steps in enumerate(alike)}.values()
    plans = [schedule.backward(rank) for rank in ranks]
    return frozenset(
        (*(kind for kind, _ in plan.largest_arrivals), *plan.most_sums.elements()) for plan in plans
    )


def _on_clock(ring: Ring, cluster: Cluster, beside: int, *, backward: bool) -> Pass:
    """A pass without the all-to-alls over heads; `beside` GPUs are in a place of their rings."""
    choice = choice_of(ring)
    taken = (choice.backward if backward else choice.forward)[0]
    links = _Links(ring.nodes, ring.shape, cluster, beside)
    seconds = _seconds(taken.schedule, links, backward=backward)
    return Pass(*seconds, taken.cost.rank, taken.cost.nic)


@lru_cache(maxsize=256)
def _seconds(schedule: Schedule, links: "_Links", *, backward: bool) -> tuple[float, float, float]:
    """Of all ranks, and of the one that computes most its kernels and its sums."""
    work, shape, machine = schedule.work(backward=backward), links.shape, links.cluster
    rate = machine.backward_rate if backward else machine.forward_rate
    dims = shape.query_heads, shape.head_dim, shape.value_head_dim
    kernels = work.pairs * attention_flops(1, *dims, backward=backward) / rate
    sums = sum_bytes(work, shape, backward) / machine.memory_rate
    sizes = shape.item_bytes(backward=backward, summed=schedule.sums_on_the_way)
    messages = links.timed(schedule.messages(backward=backward), sizes)
    lands = (step for timed in messages for step in timed.loads.lands.tolist())
    computing = np.zeros((1 + max([len(kernels), *lands]), len(links.nodes)))
    computing[: len(kernels)] = kernels + sums
    computing += links.taken_from_computing(messages, len(computing))
    most = work.pairs.sum(axis=0).argmax()
    of_most = kernels[:, most].sum(), sums[:, most].sum()
    return duration(messages, computing), float(of_most[0]), float(of_most[1])


def sum_bytes(work: Work, shape: Shape, backward: bool) -> NDArray[np.int64]:
    """Return what is read and written to add the tiles' results to the sums: [step, rank].

    And to make the outputs that are sent with no query: one for each block of another rank's.
    """
    each = shape.element_bytes + 2 * _SUM_BYTES
    a_query = shape.query_heads * (shape.head_dim if backward else shape.value_head_dim)
    a_key = shape.kv_heads * (shape.head_dim + shape.value_head_dim) if backward else 0
    output = shape.tokens * shape.query_heads * shape.value_head_dim
    rows = a_query * work.query_rows + a_key * work.key_rows
    return rows * each + 2 * work.visitors * output * shape.element_bytes


@dataclass(frozen=True, slots=True)
class _Links:
    """The links of one ring, with those of the rings beside it on the same NICs."""

    nodes: tuple[int, ...]  # of each rank
    shape: Shape
    cluster: Cluster
    beside: int

    def timed(self, messages: Iterable[Messages], sizes: Mapping[Kind, int]) -> list[Timed]:
        """Return the messages with the seconds that each takes."""
        node = np.array(self.nodes)
        loads = [each.loads(sizes, self.shape.tokens) for each in messages]
        between = [node[each.sources] != node[each.targets] for each in loads]
        nic = self._nics(node)
        leaving = np.zeros(len(node), bool)  # who sends to other nodes
        for each, leaves in zip(loads, between, strict=True):
            leaving[each.sources[leaves & (each.sizes > 0)]] = True
        shared = min(self.beside, self.cluster.gpus_per_nic) * np.bincount(nic, leaving)[nic]
        slower = shared / self.cluster.nic_rate
        return [
            Timed(x, far, np.where(far, slower[x.sources], 1 / self.cluster.within_rate) * x.sizes)
            for x, far in zip(loads, between, strict=True)
        ]

    def _nics(self, node: NDArray[np.int64]) -> NDArray[np.int64]:
        on_a_node = self.nodes.count(0)
        place = np.arange(len(node)) % on_a_node * self.beside // self.cluster.gpus_per_nic
        return node * (1 + place.max()) + place

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


def _exchange(load: Workload) -> Pass:
    """The all-to-alls over heads of one pass: one step, in which nothing is computed.

    All of a tensor is read and written to be packed, and again to be unpacked. None but those of
    Ulysses leave a node.
    """
    size, machine = load.head_parallel, load.cluster
    if size == 1:
        return Pass()
    sent = load.ring.shape.exchange_bytes(size)
    across = sent * max(0, size - load.ranks_per_node) // (size - 1)
    links = (sent - across) / machine.within_rate, across * machine.gpus_per_nic / machine.nic_rate
    repacked = 4 * sent / (size - 1) * size
    seconds = max(links) + sent / machine.copy_rate + repacked / machine.memory_rate
    return Pass(seconds, sent=sent, between=across)


def _tensor_parallel_seconds(load: Workload) -> float:
    """Gathers and scatters of activations in one layer, which wait for each other.

    Four forward, as many when it is recomputed, and six backward, of n·hidden·(T-1)/T each.
    """
    count = 4 + (4 if load.recompute else 0) + 6
    size = load.local_tokens * load.model.hidden * load.element_bytes
    return count * size * (load.tensor - 1) / load.tensor / load.cluster.within_rate


def weights_seconds(load: Workload, hidden_behind: float) -> float:
    """Gradients and weights on the links as far as computing does not hide them; the optimizer."""
    machine, ranks = load.cluster, load.data * load.context
    if ranks == 1:
        return 0.0
    own = load.model.parameters / load.tensor
    gathers = (3 if load.recompute else 2) if load.zero3 else 1
    # Gradients are scattered and weights gathered; otherwise gradients are scattered and gathered.
    returning = gathers * load.element_bytes if load.sharded else load.gradient_bytes
    moved = own * (load.gradient_bytes + returning) * (ranks - 1) / ranks
    within = load.gpus <= machine.gpus_per_node
    rate = machine.within_rate if within else machine.nic_rate / machine.gpus_per_nic
    updated = own / ranks if load.sharded else own
    optimizer = 0.0 if load.offload else 2 * 16 * updated / machine.memory_rate
    return max(0.0, moved / rate - hidden_behind) + optimizer
