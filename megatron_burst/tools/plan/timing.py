"""The time of a training step: attention by its plans on a clock, all else by FLOPs and bytes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_burst.config import Algorithm, BurstConfig, LayoutName
from megatron_burst.plans.cost import Shape, visible_pairs
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Item, Plan, Tile, assemble
from megatron_burst.plans.plan import Step as PlannedStep
from megatron_burst.plans.planning import Choice, choose, make_layout
from megatron_burst.plans.recompute import boundary
from megatron_burst.plans.schedule import Schedule
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.timeline import Message, Step, duration
from megatron_burst.plans.topology import Grid
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.plan.workload import Workload

_SUM_BYTES = 4  # of an element of a sum


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward of one layer's attention."""

    seconds: float  # until the last rank is done
    kernels: float  # of them, the tiles of the rank that has most of them
    sums: float  # and what merges and adds their results
    sent: int  # bytes, the most of any rank
    between: int  # of them, the most that any rank sends to another node

    @property
    def exposed(self) -> float:
        """Seconds in which the rank with most to do waits for messages or is slowed by them."""
        return max(0.0, self.seconds - self.kernels - self.sums)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a step."""

    forward: Pass  # of a layer
    again: Pass | None  # the second forward, of a recomputed layer
    backward: Pass
    attention: float  # seconds of all layers
    linear: float  # matrix products
    tensor: float  # messages of tensor parallelism
    weights: float  # gradients and weights that no computing hides, and the optimizer
    seconds: float
    tokens_per_gpu: float  # a second
    mfu: float

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Those of a layer."""
        return (self.forward, *((self.again,) if self.again else ()), self.backward)

    @property
    def exposed_share(self) -> float:
        """The share of attention's time that messages take."""
        return sum(p.exposed for p in self.passes) / sum(p.seconds for p in self.passes)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends for attention of one layer."""
        return sum(p.sent for p in self.passes)

    @property
    def between(self) -> int:
        """Bytes of them that a rank sends to other nodes, through its NIC."""
        return sum(p.between for p in self.passes)


def predict(load: Workload) -> Prediction:
    """Predict a step; see the fields of the result."""
    forward, again, backward = attention_passes(load)
    per_gpu = load.sequences / load.data
    layers = load.model.layers * per_gpu
    attention = layers * sum(p.seconds for p in (forward, again, backward) if p)
    linear = per_gpu * linear_flops(load) / load.cluster.linear_rate
    tensor = layers * _tensor_parallel_seconds(load)
    weights = _weights_seconds(load, attention + linear)
    seconds = attention + linear + tensor + weights
    rate = load.sequences * load.tokens / load.gpus / seconds
    mfu = rate * model_flops(load) / load.tokens / load.cluster.peak
    return Prediction(
        forward, again, backward, attention, linear, tensor, weights, seconds, rate, mfu
    )


def model_flops(load: Workload) -> float:
    """Return the FLOPs of a sequence that MFU counts: 3 x forward, visible pairs, no recompute."""
    return load.model.step_flops(load.tokens, visible_pairs(load.mask, load.tokens))


def linear_flops(load: Workload) -> float:
    """Return the FLOPs of one GPU's matrix products for a sequence."""
    model, tokens = load.model, load.local_tokens / load.tensor
    layers = 2 * tokens * model.layers * model.layer_parameters * (4 if load.recompute else 3)
    of_head = load.head_products if load.chunked_loss else 3
    return layers + 2 * tokens * model.head_parameters * of_head


def attention_passes(load: Workload) -> tuple[Pass, Pass | None, Pass]:
    """Return the forward, what of it is recomputed, and the backward of one layer."""
    alone, fraction = _attention_alone(load), load.config.recompute_fraction
    forward = _one_pass(alone, load.mask, backward=False)
    again: Pass | None = None
    if load.recompute and fraction is None:
        again = forward
    elif load.recompute and fraction == 0 and load.head_parallel > 1:
        # The results are saved, but heads and tokens change places again.
        again = Pass(_exchange_seconds(load), 0.0, 0.0, load.exchange_bytes, _across(load))
    elif load.recompute and fraction:
        stop = boundary(load.layout, fraction)
        again = _one_pass(alone, replace(load.mask, query_stop=stop), backward=False)
    return forward, again, _one_pass(alone, load.mask, backward=True)


def _attention_alone(load: Workload) -> Workload:
    """The same without what makes no difference to a pass, so that equal ones are known."""
    model = replace(load.model, layers=1, hidden=0, ffn=0, gated=False, vocabulary=0, tied=False)
    config = load.config
    if not (config.layout is LayoutName.SEGMENTED_ZIGZAG and config.cuts_for_recompute):
        config = replace(config, recompute_fraction=None)
    return replace(
        load,
        model=model,
        config=config,
        sequences=1,
        recompute=False,
        chunked_loss=True,
        loss_bytes=0,
        head_products=0,
        zero3=False,
        sharded=True,
        gradient_bytes=0,
        offload=False,
    )


def plans(load: Workload) -> tuple[tuple[Plan, ...], tuple[Plan, ...]]:
    """Return the plans of forward and backward of all ranks of one ring."""
    alone = _attention_alone(load)
    return _plans(alone, load.mask, backward=False), _plans(alone, load.mask, backward=True)


@lru_cache(maxsize=256)
def _one_pass(load: Workload, mask: Mask, *, backward: bool) -> Pass:
    shape, machine = load.shape, load.cluster
    plans = _plans(load, mask, backward=backward)
    rate = machine.backward_rate if backward else machine.forward_rate

    def kernels(tiles: Sequence[Tile]) -> float:
        return sum(tile_flops(tile, shape, backward) for tile in tiles) / rate

    def sums(tiles: Sequence[Tile], rank: int) -> float:
        moved = sum(_sum_bytes(tile, shape, backward) for tile in tiles)
        return (moved + _surrogate_bytes(tiles, shape, rank)) / machine.memory_rate

    network = _Network(load, plans)
    ranks = {
        plan.rank: [
            network.step(plan.rank, step, kernels(step.tiles) + sums(step.tiles, plan.rank))
            for step in plan.steps
        ]
        for plan in plans
    }
    busiest = max(plans, key=lambda plan: kernels(plan.tiles))
    return Pass(
        seconds=duration(ranks) + _exchange_seconds(load),
        kernels=kernels(busiest.tiles),
        sums=sums(busiest.tiles, busiest.rank),
        sent=max(map(network.sent, plans)) + load.exchange_bytes,
        between=max(map(network.sent_between, plans)) + _across(load),
    )


def _plans(load: Workload, mask: Mask, *, backward: bool) -> tuple[Plan, ...]:
    """The plans that `planning` chooses, of all ranks of one ring."""
    return _made(
        load.config, load.tokens, mask, load.grid, load.nodes, load.shape, backward=backward
    )


@lru_cache(maxsize=64)
def _made(
    config: BurstConfig,
    tokens: int,
    mask: Mask,
    grid: Grid,
    nodes: tuple[int, ...],
    shape: Shape,
    *,
    backward: bool,
) -> tuple[Plan, ...]:
    choice = _choice(config, tokens, mask, grid, nodes, shape)
    schedule = choice.backward if backward else choice.forward
    return tuple(plans_of(schedule, backward=backward))


@lru_cache(maxsize=64)
def _choice(
    config: BurstConfig,
    tokens: int,
    mask: Mask,
    grid: Grid,
    nodes: tuple[int, ...],
    shape: Shape,
) -> Choice:
    layout = make_layout(config, tokens, grid.ranks)
    return choose(config, Tiling(layout, mask), grid, shape.item_bytes(), nodes)


def plans_of(schedule: Schedule, *, backward: bool) -> list[Plan]:
    """Return the plans of all ranks; equal to those made rank by rank, from one list of hops."""
    ours = defaultdict(list)
    for hop in schedule.hops(backward=backward):
        for rank in (hop.source, hop.target):
            ours[rank].append(hop)
    ranks = range(schedule.tiling.ranks)
    return [assemble(rank, ours[rank], schedule.tiles(rank, backward=backward)) for rank in ranks]


def tile_flops(tile: Tile, shape: Shape, backward: bool) -> float:
    """Return the FLOPs of a tile's visible pairs: 2 products forward, 5 backward."""
    dims = shape.head_dim, shape.value_head_dim
    return attention_flops(tile.pairs, shape.query_heads, *dims, backward=backward)


def _sum_bytes(tile: Tile, shape: Shape, backward: bool) -> int:
    """What is read and written to add a tile's results to the sums."""
    each = shape.element_bytes + 2 * _SUM_BYTES
    queries = tile.query_rows.length * shape.query_heads
    if not backward:
        return queries * shape.value_head_dim * each
    keys = tile.key_rows.length * shape.kv_heads * (shape.head_dim + shape.value_head_dim)
    return (queries * shape.head_dim + keys) * each


def _surrogate_bytes(tiles: Sequence[Tile], shape: Shape, rank: int) -> int:
    """What is read and written to make the outputs that are sent with no query: one a block."""
    blocks = {tile.query_owner for tile in tiles} - {rank}
    elements = shape.tokens * shape.query_heads * shape.value_head_dim
    return 2 * len(blocks) * elements * shape.element_bytes


class _Network:
    """The links of one ring, with those of the rings beside it on the same NICs."""

    def __init__(self, load: Workload, plans: Sequence[Plan]) -> None:
        self._load, self._sizes = load, load.shape.item_bytes()
        self._on_nic: dict[tuple[int, int], int] = defaultdict(int)
        for plan in plans:
            if any(self._leaves(plan.rank, send.peer) for send in plan.sends):
                self._on_nic[self._nic(plan.rank)] += self._beside

    @property
    def _beside(self) -> int:
        return min(self._load.rings_beside, self._load.cluster.gpus_per_nic)

    def step(self, rank: int, step: PlannedStep, seconds: float) -> Step:
        """Return a step of a plan with its times; what messages take from computing is in them."""
        machine = self._load.cluster
        sends = [self._message(s.item, rank, s.peer, s.lands) for s in step.sends]
        receives = [self._message(r.item, r.peer, rank, r.lands) for r in step.receives]
        busy = max(sum(message.seconds for message in ends) for ends in (sends, receives))
        sent = sum(self._size(send.item) for send in step.sends)
        lost = machine.contention * busy + sent / machine.copy_rate
        return Step(seconds + lost, sends, receives)

    def sent(self, plan: Plan) -> int:
        """Return the bytes that the plan's rank sends."""
        return sum(self._size(send.item) for send in plan.sends)

    def sent_between(self, plan: Plan) -> int:
        """Return the bytes that it sends to ranks of other nodes."""
        leaving = (send for send in plan.sends if self._leaves(plan.rank, send.peer))
        return sum(self._size(send.item) for send in leaving)

    def _size(self, item: Item) -> int:
        whole, rows = self._sizes[item.kind], self._load.shape.tokens
        return whole if item.part is None else whole * item.part.length // rows

    def _message(self, item: Item, source: int, target: int, lands: int) -> Message:
        size, machine = self._size(item), self._load.cluster
        if not self._leaves(source, target):
            return Message(source, target, "within", lands, size / machine.within_rate)
        sharing = self._on_nic[self._nic(source)]
        return Message(source, target, "between", lands, size * sharing / machine.nic_rate)

    def _leaves(self, source: int, target: int) -> bool:
        return self._load.nodes[source] != self._load.nodes[target]

    def _nic(self, rank: int) -> tuple[int, int]:
        """The node and the number of the NIC of a rank."""
        place = rank % self._load.ring_ranks_per_node * self._load.rings_beside
        return self._load.nodes[rank], place // self._load.cluster.gpus_per_nic


def _exchange_seconds(load: Workload) -> float:
    """The all-to-alls over heads of one pass: one step, in which nothing is computed.

    All of a tensor is read and written to be packed, and again to be unpacked.
    """
    size, machine = load.head_parallel, load.cluster
    if size == 1:
        return 0.0
    across = _across(load)
    within = load.exchange_bytes - across
    on_links = max(within / machine.within_rate, across * machine.gpus_per_nic / machine.nic_rate)
    repacked = 4 * load.exchange_bytes / (size - 1) * size
    return on_links + load.exchange_bytes / machine.copy_rate + repacked / machine.memory_rate


def _across(load: Workload) -> int:
    """Bytes of one pass's all-to-alls that a rank sends to other nodes: none but Ulysses' leave."""
    size = load.head_parallel
    if load.config.algorithm is not Algorithm.ULYSSES or size == 1:
        return 0
    return load.exchange_bytes * (size - load.ranks_per_node) // (size - 1)


def _tensor_parallel_seconds(load: Workload) -> float:
    """Gathers and scatters of activations in one layer, which wait for each other.

    Four forward, as many when it is recomputed, and six backward, of n·hidden·(T-1)/T each.
    """
    count = 4 + (4 if load.recompute else 0) + 6
    size = load.local_tokens * load.model.hidden * load.element_bytes
    return count * size * (load.tensor - 1) / load.tensor / load.cluster.within_rate


def _weights_seconds(load: Workload, hidden_behind: float) -> float:
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
