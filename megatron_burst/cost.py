"""What a plan costs, counted: bytes that a rank sends and pairs of tokens that it computes."""

from collections.abc import Mapping

from megatron_burst.layout import Layout
from megatron_burst.mask import Mask
from megatron_burst.plan import Kind, Plan, tiles_of_pair


def kv_ring_bytes(
    *, local_tokens: int, kv_heads: int, head_dims: int, element_bytes: int, gradient_bytes: int
) -> dict[Kind, int]:
    """Return the bytes of one block and of one gradient that travel in the kv ring.

    `local_tokens` counts the batch: batch x tokens a rank. `head_dims` is the size of a K head and
    of a V head together. A hop of the backward is n·Hkv·(dk + dv)·(e + g).
    """
    elements = local_tokens * kv_heads * head_dims
    return {Kind.KV: elements * element_bytes, Kind.D_KV: elements * gradient_bytes}


def bytes_sent(plan: Plan, sizes: Mapping[Kind, int]) -> int:
    """Return the payload bytes that the plan's rank sends, given the bytes of an item."""
    return sum(sizes[transfer.item.kind] for step in plan.steps for transfer in step.sends)


def pairs_computed(plan: Plan) -> int:
    """Return how many visible (query, key) pairs the plan's rank computes, per head."""
    return sum(tile.pairs for tile in plan.tiles)


def imbalance(layout: Layout, mask: Mask) -> float:
    """Return max / mean over the ranks of the pairs they compute; 1.0 is perfect."""
    ranks = range(layout.ranks)
    pairs = [
        sum(tile.pairs for owner in ranks for tile in tiles_of_pair(layout, mask, rank, owner))
        for rank in ranks
    ]
    return max(pairs) * len(pairs) / sum(pairs)
