"""Chooses the Ulysses degree by the clock: all ranks' forward and backward, all-to-alls among them.

An all-to-all is waited for where a ring's messages hide; but it makes fewer, larger kernel calls,
and fewer bytes. What each degree takes depends on links, heads and the length of shards.
"""

import math
from collections.abc import Hashable, Sequence

from megatron_burst.config import Algorithm, BurstConfig, Mla
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.head_parallel import exchanged, head_groups, kv_head_copies
from megatron_burst.plans.choice.machine import H100, Machine
from megatron_burst.plans.choice.planning import choose, mib
from megatron_burst.plans.choice.timing import Links, exchange, least_seconds
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import by_node, choose_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask

_WORTH = 0.99  # of the time of a larger degree; less is not worth the search
_HELD = 3  # tensors of the size of q that a forward holds beside those of rings alone
_RANKS = 128  # of a ring that is timed; one of more takes longer by as much
_OF_RINGS = "backward", "topology"  # of no effect without


def choose_degree(
    config: BurstConfig,
    nodes: Sequence[Hashable],
    shape: Shape | str,
    memory_limit: float = math.inf,
    machine: Machine = H100,
) -> tuple[int, str]:
    """Return the Ulysses degree, and for the log why it is what it is.

    If it is not given, it is for burst the fastest by the clock of those that divide the query
    heads, with copies of kv heads where these are fewer: the ranks of part of a node, of a node, or
    of several whole ones, up to all; 1 where there is no memory for another. The mask is causal
    and dense.

    The shape is of a rank's tensors before any all-to-all, or says why none is known for all
    layers; the memory limit, in bytes, is that of `choose`.
    """
    if config.head_parallel_size is not None or config.algorithm is not Algorithm.BURST:
        return config.head_parallel_size or 1, ""
    if isinstance(shape, str):
        return 1, shape
    if config.mla is Mla.LATENT:
        return 1, "latents are to travel, which have no heads to share out"
    if any(getattr(config, name) != "auto" for name in _OF_RINGS):
        return 1, "rings are asked for by a topology or a backward that is given"
    chunks = config.head_chunks or 1
    sizes = degrees(nodes, shape.query_heads, shape.kv_heads)
    if not (sizes := [n for n in sizes if exchanged(shape, n).kv_heads % chunks == 0]):
        return 1, "no other degree divides its heads, in their chunks, and the ranks of every node"
    held = _HELD * shape.tokens * shape.query_heads * shape.head_dim * shape.element_bytes
    if held > memory_limit:
        allowed = f"--burst-memory-mb allows {mib(memory_limit)}"
        return 1, f"another would hold {mib(held)} more, and {allowed}"
    seconds = dict[int, float]()
    for size in (*reversed(sizes), 1):
        timed = _Timed(config, nodes, shape, size, memory_limit, machine)
        if not seconds or timed.at_least < _WORTH * min(seconds.values()):
            seconds[size] = timed.seconds
    best = min(seconds, key=seconds.__getitem__)
    others = ", ".join(f"{1e3 * seconds[size]:.3g} ms with {size}" for size in seconds)
    return best, f"reckoned for a layer's attention: {others}; more with others"


def degrees(nodes: Sequence[Hashable], query_heads: int, kv_heads: int) -> list[int]:
    """Return the Ulysses degrees above 1: divisors of every node, or so many whole nodes.

    They share out so many heads of a rank, with copies of kv heads where these are fewer.
    """
    per_node = [len(row) for row in by_node(nodes)]
    sizes = [size for size in range(2, math.gcd(*per_node) + 1) if math.gcd(*per_node) % size == 0]
    if len({*per_node}) == 1:
        sizes += [n * per_node[0] for n in range(2, len(per_node) + 1) if len(per_node) % n == 0]
    return [size for size in sizes if _divides(query_heads, kv_heads, size)]


def _divides(query_heads: int, kv_heads: int, size: int) -> bool:
    try:
        return kv_head_copies(query_heads, kv_heads, size) > 0
    except ValueError:
        return False


class _Timed:
    """What a degree takes, by what it does with rings of no more than `_RANKS`."""

    def __init__(
        self,
        config: BurstConfig,
        nodes: Sequence[Hashable],
        shape: Shape,
        size: int,
        memory_limit: float,
        machine: Machine,
    ) -> None:
        node_ranks = by_node(nodes)
        on_a_node = len(node_ranks[0])
        fewer = max(_RANKS * size // on_a_node, 1) * on_a_node
        self._rounds = 1.0
        if len(nodes) > fewer and all(len(row) == on_a_node for row in node_ranks):
            self._rounds = len(nodes) / fewer
            nodes = [node for node in dict.fromkeys(nodes) for _ in range(on_a_node)][:fewer]
        self._config, self._limit, self._machine = config, memory_limit, machine
        self._groups, self._nodes = head_groups(nodes, size), nodes
        self._beside, self._shape = min(size, on_a_node), exchanged(shape, size)
        self._exchange = exchange(self._shape, size, on_a_node, machine)

    @property
    def at_least(self) -> float:
        """Seconds without a ring's messages."""
        ranks = len(self._groups.groups)
        of_rings = [
            (least_seconds(ranks, self._shape, self._machine, backward=back), ranks * hop)
            for back, hop in zip((False, True), self._machine.hop_seconds, strict=True)
        ]
        return self._with_exchanges(of_rings)

    @property
    def seconds(self) -> float:
        """Of a forward and a backward by the schedules that are taken."""
        of_rings = [self._nodes[members[0]] for members in self._groups.groups]
        grid, _ = choose_grid(self._config.shape_of_rings, of_rings)
        local = self._shape.tokens // self._groups.size // self._shape.batch
        tokens = max(2, local // 2 * 2) * len(self._nodes)
        tiling = Tiling(self._groups.ring_layout(zigzag(tokens, len(self._nodes))), Mask.causal())
        links = Links.of(of_rings, self._shape, self._machine, self._beside)
        given = self._config, tiling, grid, self._shape, of_rings
        choice = choose(*given, memory_limit=self._limit, links=links)
        slower = 1 + self._machine.hop_slowness * (len(of_rings) - 1)
        return slower * self._with_exchanges([each[:2] for each in choice.times(links)])

    def _with_exchanges(self, of_rings: Sequence[tuple[float, float]]) -> float:
        """Return the seconds of passes, of which device and host are given without all-to-alls.

        A ring of more ranks takes longer by as much, and its all-to-alls do not.
        """
        seconds = sum(
            max(
                self._exchange.device + self._rounds * device,
                self._exchange.host + self._rounds * host,
            )
            for device, host in of_rings
        )
        # Recomputed layers whose outputs are saved repeat them.
        again = self._config.recompute_fraction is not None
        return seconds + again * max(self._exchange.device, self._exchange.host)
