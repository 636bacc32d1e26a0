"""The time of a training step: attention by its plans on a clock, all else by FLOPs and bytes."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_burst.plans.cost import Shape, payload, visible_pairs
from megatron_burst.plans.layout import Layout, boundary
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Item, Plan, Step, Tile, assemble
from megatron_burst.plans.planning import Choice, choose
from megatron_burst.plans.schedule import Schedule
from megatron_burst.plans.tiles import Tiling
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan.clock import duration
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
def _choice(ring: Ring) -> Choice:
    tiling = _tiling(ring.layout, ring.mask)
    limit = ring.config.memory_limit(ring.card)
    return choose(ring.config, tiling, ring.grid, ring.shape, ring.nodes, memory_limit=limit)


@lru_cache(maxsize=32)
def _tiling(layout: Layout, mask: Mask) -> Tiling:
    """Rings that differ in what they send have the same tiles."""
    return Tiling(layout, mask)


@lru_cache(maxsize=64)
def plans(ring: Ring, *, backward: bool) -> tuple[Plan, ...]:
    """Return the plans that training chooses, of all ranks of a ring."""
    choice = _choice(ring)
    offers = choice.backward if backward else choice.forward
    return plans_of(offers[0].schedule, backward=backward)


def plans_of(schedule: Schedule, *, backward: bool) -> tuple[Plan, ...]:
    """Return the plans of all ranks; equal to those made rank by rank, from one list of hops."""
    ours = defaultdict(list)
    for messages in schedule.messages(backward=backward):
        for hop in messages.hops():
            ours[hop.source].append(hop)
            ours[hop.target].append(hop)
    ranks = range(schedule.tiling.ranks)
    tiles = (schedule.tiles(rank, backward=backward) for rank in ranks)
    return tuple(assemble(rank, ours[rank], each) for rank, each in zip(ranks, tiles, strict=True))


@lru_cache(maxsize=256)
def _on_clock(ring: Ring, cluster: Cluster, beside: int, *, backward: bool) -> Pass:
    """A pass without the all-to-alls over heads; `beside` GPUs are in a place of their rings."""
    every, links = plans(ring, backward=backward), _Links(ring, cluster, beside, backward)
    rate = cluster.backward_rate if backward else cluster.forward_rate

    def kernels(tiles: Sequence[Tile]) -> float:
        return sum(tile_flops(tile, ring.shape, backward) for tile in tiles) / rate

    def sums(tiles: Sequence[Tile], rank: int) -> float:
        return sum_bytes(tiles, ring.shape, rank, backward) / cluster.memory_rate

    def computing(rank: int, step: Step) -> float:
        seconds = kernels(step.tiles) + sums(step.tiles, rank)
        return seconds + links.taken_from_computing(rank, step)

    busiest = max(every, key=lambda plan: kernels(plan.tiles))
    choice = _choice(ring)
    cost = (choice.backward if backward else choice.forward)[0].cost
    return Pass(
        duration(every, computing, links.message),
        kernels(busiest.tiles),
        sums(busiest.tiles, busiest.rank),
        cost.rank,
        cost.nic,
    )


def tile_flops(tile: Tile, shape: Shape, backward: bool) -> float:
    """Return the FLOPs of a tile's visible pairs: 2 products forward, 5 backward."""
    dims = shape.head_dim, shape.value_head_dim
    return attention_flops(tile.pairs, shape.query_heads, *dims, backward=backward)


def sum_bytes(tiles: Sequence[Tile], shape: Shape, rank: int, backward: bool) -> int:
    """Return what is read and written to add the tiles' results to the sums.

    And to make the outputs that are sent with no query: one for each block of another rank's.
    """
    each = shape.element_bytes + 2 * _SUM_BYTES
    a_query = shape.query_heads * (shape.head_dim if backward else shape.value_head_dim)
    a_key = shape.kv_heads * (shape.head_dim + shape.value_head_dim) if backward else 0
    rows = sum(a_query * t.query_rows.length + a_key * t.key_rows.length for t in tiles)
    visitors = len({tile.query_owner for tile in tiles} - {rank})
    output = shape.tokens * shape.query_heads * shape.value_head_dim
    return rows * each + 2 * visitors * output * shape.element_bytes


class _Links:
    """The links of one ring, with those of the rings beside it on the same NICs."""

    def __init__(self, ring: Ring, cluster: Cluster, beside: int, backward: bool) -> None:
        self._ring, self._cluster = ring, cluster
        self._sizes = ring.shape.item_bytes(backward=backward)
        on_a_node = ring.nodes.count(0)
        self._nics = [
            (node, rank % on_a_node * beside // cluster.gpus_per_nic)
            for rank, node in enumerate(ring.nodes)
        ]
        self._rings = min(beside, cluster.gpus_per_nic)
        self._leaving = Counter(
            self._nics[plan.rank]
            for plan in plans(ring, backward=backward)
            if any(ring.nodes[plan.rank] != ring.nodes[send.peer] for send in plan.sends)
        )

    def message(self, item: Item, source: int, target: int) -> tuple[str, float]:
        """Return the network that an item takes from rank to rank, and for how many seconds."""
        size, nodes = self._size(item), self._ring.nodes
        if nodes[source] == nodes[target]:
            return "within", size / self._cluster.within_rate
        shared = size * self._rings * self._leaving[self._nics[source]]
        return "between", shared / self._cluster.nic_rate

    def taken_from_computing(self, rank: int, step: Step) -> float:
        """Return the seconds that a step's messages take from the computing beside them."""
        sending = sum(self.message(s.item, rank, s.peer)[1] for s in step.sends)
        receiving = sum(self.message(r.item, r.peer, rank)[1] for r in step.receives)
        copied = sum(self._size(send.item) for send in step.sends) / self._cluster.copy_rate
        return self._cluster.contention * max(sending, receiving) + copied

    def _size(self, item: Item) -> int:
        return payload(item, self._sizes, self._ring.shape.tokens)


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
