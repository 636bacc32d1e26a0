"""Chooses the Ulysses degree by what a rank sends within its node, counted; not timed."""

import math
from collections.abc import Hashable, Sequence

from megatron_burst.config import Algorithm, BurstConfig, Mla
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.head_parallel import exchanged, head_groups
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import choose, mib
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import by_node, choose_grid

_WORTH = 0.5  # of the bytes of rings alone: theirs hide, an all-to-all is waited for
_HELD = 3  # tensors of the size of q that a forward holds beside those of rings alone
_OF_RINGS = "backward", "topology"  # of no effect without
_LONG = 32768
"""Tokens of a rank beyond which memory is worth more: over NVLink a degree saves, by the clock, in
messages and in merging, 1000/n to 2700/n of attention's time with n tokens, whatever the heads."""


def choose_degree(
    config: BurstConfig,
    nodes: Sequence[Hashable],
    shape: Shape | str,
    memory_limit: float = math.inf,
) -> tuple[int, str]:
    """Return the Ulysses degree, and for the log why it is what it is.

    If it is not given, it is for burst the one with which a rank sends least within its node, if
    that is at most half of what it sends there with 1, shards are not long, and there is memory; a
    divisor of the ranks of every node and of the kv heads, so that between nodes none sends more
    than 1. A flat ring over several nodes counts whole. The mask is causal and dense.

    The shape is of a rank's tensors before any all-to-all, or says why none is known for all
    layers; the memory limit, in bytes, is that of `choose`.
    """
    if config.head_parallel_size is not None or config.algorithm is not Algorithm.BURST:
        return config.head_parallel_size or 1, ""
    if isinstance(shape, str):
        return 1, shape
    if config.mla is Mla.LATENT:
        return 1, "latents are to travel, which have no heads to share out"
    if any(getattr(config, name) not in ("auto", None) for name in _OF_RINGS):
        return 1, "rings are asked for by a topology or a backward that is given"
    share = math.gcd(shape.kv_heads, *map(len, by_node(nodes)))
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    if sizes == [1]:
        return 1, "no other degree divides its kv heads and the ranks of every node"
    if why := _too_much(shape, memory_limit):
        return 1, why
    sent = {size: _sent(config, nodes, shape, size) for size in sizes}
    best = min(sizes, key=sent.__getitem__)
    taken = best if sent[best] <= _WORTH * sent[1] else 1
    shares = ", ".join(f"{sent[size] / sent[1]:.2f} with {size}" for size in sizes[1:])
    return taken, f"of what a rank sends within its node with 1 it sends {shares}"


def _too_much(shape: Shape, memory_limit: float) -> str:
    """Say why what another degree holds is too much; nothing if it is not."""
    held = _HELD * shape.tokens * shape.query_heads * shape.head_dim * shape.element_bytes
    said = f"another would hold {mib(held)} more, and"
    if shape.tokens > _LONG:
        return f"{said} saves little time with {shape.tokens} tokens a rank"
    return f"{said} --burst-memory-mb allows {mib(memory_limit)}" if held > memory_limit else ""


def _sent(config: BurstConfig, nodes: Sequence[Hashable], shape: Shape, size: int) -> int:
    """Return the bytes within a node of a forward and a backward."""
    heads = head_groups(nodes, size)
    of_rings = [nodes[members[0]] for members in heads.groups]
    grid, _ = choose_grid(config.shape_of_rings, of_rings)
    layout = zigzag(2 * len(nodes), len(nodes))  # the share of a block that is sent stays
    tiling = Tiling(heads.ring_layout(layout), Mask.causal())
    shared = exchanged(shape, size)
    choice = choose(config, tiling, grid, shared, of_rings)
    # Recomputed layers whose outputs are saved repeat it.
    times = 2 if config.recompute_fraction is None else 3
    rings = [choice.forward[0].cost, choice.backward[0].cost]
    within = sum(ring.rank - (ring.nic if grid.nodes > 1 else 0) for ring in rings)
    return within + times * shared.exchange_bytes(size)
