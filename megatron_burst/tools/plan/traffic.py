"""What every algorithm sends for one attention layer, counted in the plans of all ranks.

Under a causal mask or none these are the bytes of zigzag and of every other layout. With head
parallelism over U ranks there are U rings of P/U ranks, which hold U times the tokens and 1/U of
the heads; every rank also sends what the all-to-all over the heads takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_burst.attention.head_exchange import exchange_plan
from megatron_burst.config import Algorithm, Backward, BurstConfig, GradientReturn, Topology
from megatron_burst.plans.cost import Shape, Traffic, traffic
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.plan import Hop, Kind
from megatron_burst.plans.planning import choose
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import choose_grid

_RINGS = (
    (Algorithm.RING, Backward.AUTO),
    (Algorithm.BURST, Backward.KV),
    (Algorithm.BURST, Backward.QUERY),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Equal nodes and the attention of one layer, as one of the rings has them."""

    nodes: int
    ranks_per_node: int
    shape: Shape
    head_parallel_size: int = 1  # how many rings there are, each of other heads

    @property
    def ranks(self) -> int:
        """P, the ranks of a ring: of all without head parallelism."""
        return self.nodes * self.ranks_per_node

    @property
    def placement(self) -> list[int]:
        """The node of each rank."""
        return [rank // self.ranks_per_node for rank in range(self.ranks)]

    @cached_property
    def tiling(self) -> Tiling:
        """The tiles under zigzag; the number of tokens makes no difference to what is sent."""
        return Tiling(zigzag(4 * self.ranks, self.ranks), Mask.causal())

    def of_a_ring(self, size: int) -> "Setting":
        """Return the setting of one of the rings if the heads are spread over `size` ranks.

        Raises:
            ValueError: `size` ranks cannot share out the heads, or do not divide a node.
        """
        if self.ranks_per_node % size:
            raise ValueError(
                f"--head-parallel-size {size} does not divide --gpus-per-node {self.ranks_per_node}"
            )
        shape = self.shape
        copies = kv_head_copies(shape.query_heads, shape.kv_heads, size)
        shape = replace(
            shape,
            tokens=shape.tokens * size,
            query_heads=shape.query_heads // size,
            kv_heads=shape.kv_heads * copies // size,
        )
        per_node = self.ranks_per_node // size
        return replace(self, ranks_per_node=per_node, shape=shape, head_parallel_size=size)


@dataclass(frozen=True, slots=True)
class Row:
    """What one algorithm sends, or why it cannot run."""

    algorithm: str
    forward: Traffic | None = None
    backward: Traffic | None = None
    why_not: str = ""


def rows(setting: Setting, gradient_return: GradientReturn = GradientReturn.AUTO) -> Iterator[Row]:
    """Count every algorithm; what `burst` chooses by itself comes first."""
    yield _ring(setting, BurstConfig(gradient_return=gradient_return))
    for algorithm, backward in _RINGS:
        for topology in (Topology.FLAT, Topology.DOUBLE):
            yield _ring(
                setting,
                BurstConfig(
                    algorithm=algorithm,
                    backward=backward,
                    topology=topology,
                    gradient_return=gradient_return,
                ),
            )
    if setting.head_parallel_size > 1:
        yield Row("allgather", why_not="no head parallelism with it")
        yield Row("ulysses", why_not="is --head-parallel-size P: count it without that option")
    else:
        gather = BurstConfig(
            algorithm=Algorithm.ALLGATHER,
            topology=Topology.FLAT,
            gradient_return=gradient_return,
        )
        yield _ring(setting, gather)
        yield _ulysses(setting)


def _ring(setting: Setting, config: BurstConfig) -> Row:
    grid, _ = choose_grid(config.topology, setting.placement)
    sizes = setting.shape.item_bytes()
    found = choose(config, setting.tiling, grid, sizes, setting.placement)
    words: list[str] = [config.algorithm]
    if config.topology is Topology.AUTO:
        words.append(f"auto: {found.chosen} {'double' if grid.nodes > 1 else 'flat'}")
    elif config.algorithm is not Algorithm.ALLGATHER:
        words += [config.backward] if config.backward is not Backward.AUTO else []
        words.append(config.topology)
    forward, backward = found.forward_traffic, found.backward_traffic[found.chosen]
    return Row(" ".join(words), _exchanged(setting, forward), _exchanged(setting, backward))


def _exchanged(setting: Setting, ring: Traffic) -> Traffic:
    """Add the all-to-all, which stays in the node, and the rings of the other heads."""
    size = setting.head_parallel_size
    return Traffic(ring.rank + setting.shape.exchange_bytes(size), ring.card, ring.node * size)


def _ulysses(setting: Setting) -> Row:
    """Count an all-to-all of q, k, v and out; the backward's of their gradients is the same."""
    shape, ranks = setting.shape, setting.ranks
    try:
        copies = kv_head_copies(shape.query_heads, shape.kv_heads, ranks)
    except ValueError:
        given = f"{shape.query_heads} query and {shape.kv_heads} kv heads"
        return Row("ulysses", why_not=f"{given} cannot be shared out evenly over {ranks} ranks")
    heads = (shape.query_heads + shape.kv_heads * copies) // ranks
    dims = shape.head_dim + shape.value_head_dim
    hops = [
        Hop(send.item, rank, send.peer, send.channel, 0, send.lands)
        for rank in range(ranks)
        for send in exchange_plan(rank, ranks).sends
    ]
    size = shape.tokens * heads * dims * shape.element_bytes
    counted = traffic(hops, {Kind.HEADS: size}, setting.placement)
    return Row("ulysses", counted, counted)
