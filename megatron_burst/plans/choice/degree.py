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
from megatron_burst.plans.choice.timing import Links, exchange
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import by_node, choose_grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask

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
    if not (sizes := degrees(nodes, shape.query_heads, shape.kv_heads)):
        return 1, "no other degree divides its heads and the ranks of every node"
    held = _HELD * shape.tokens * shape.query_heads * shape.head_dim * shape.element_bytes
    if held > memory_limit:
        allowed = f"--burst-memory-mb allows {mib(memory_limit)}"
        return 1, f"another would hold {mib(held)} more, and {allowed}"
    given = config, nodes, shape, memory_limit, machine
    found = {size: _seconds(size, *given) for size in (*reversed(sizes), 1)}
    best = min(found, key=found.__getitem__)
    others = ", ".join(f"{1e3 * found[size]:.3g} ms with {size}" for size in found)
    return best, f"reckoned for a layer's attention: {others}"


def degrees(nodes: Sequence[Hashable], query_heads: int, kv_heads: int) -> list[int]:
    """Return the Ulysses degrees above 1: divisors of every node, or so many whole nodes.

    They share out so many heads of a rank, with copies of kv heads where these are fewer.
    """
    rows = [len(row) for row in by_node(nodes)]
    found = [size for size in range(2, math.gcd(*rows) + 1) if math.gcd(*rows) % size == 0]
    if len({*rows}) == 1:
        found += [n * rows[0] for n in range(2, len(rows) + 1) if len(rows) % n == 0]
    return [size for size in found if _divides(query_heads, kv_heads, size)]


def _divides(query_heads: int, kv_heads: int, size: int) -> bool:
    try:
        return kv_head_copies(query_heads, kv_heads, size) > 0
    except ValueError:
        return False


def _seconds(
    size: int,
    config: BurstConfig,
    nodes: Sequence[Hashable],
    shape: Shape,
    memory_limit: float,
    machine: Machine,
) -> float:
    """Return what a layer takes with a degree, by the schedules that are taken.

    A ring of more than `_RANKS` takes longer than one of these by as much, and its all-to-alls do
    not.
    """
    nodes, rounds = _fewer(nodes, size)
    groups, on_a_node = head_groups(nodes, size), len(by_node(nodes)[0])
    of_rings = [nodes[members[0]] for members in groups.groups]
    grid, _ = choose_grid(config.shape_of_rings, of_rings)
    shape = exchanged(shape, size)
    tokens = max(2, shape.tokens // size // 2 * 2) * len(nodes)
    tiling = Tiling(groups.ring_layout(zigzag(tokens, len(nodes))), Mask.causal())
    links = Links.of(of_rings, shape, machine, min(size, on_a_node))
    choice = choose(config, tiling, grid, shape, of_rings, memory_limit, links)
    swap = exchange(shape, size, on_a_node, machine)
    found = sum(
        max(swap.device + rounds * each.device, swap.host + rounds * each.host)
        for each in choice.times(links)
    )
    if config.recompute_fraction is not None:  # layers whose outputs are saved repeat them
        found += max(swap.device, swap.host)
    return found * (machine.ring_slowness if len(of_rings) > 1 else 1.0)


def _fewer(nodes: Sequence[Hashable], size: int) -> tuple[Sequence[Hashable], float]:
    """Return the nodes of as many ranks as are timed, and how many times as many there are."""
    rows = by_node(nodes)
    on_a_node = len(rows[0])
    fewer = max(_RANKS * size // on_a_node, 1) * on_a_node
    if len(nodes) <= fewer or any(len(row) != on_a_node for row in rows):
        return nodes, 1.0
    every = [node for node in dict.fromkeys(nodes) for _ in range(on_a_node)]
    return every[:fewer], len(nodes) / fewer
