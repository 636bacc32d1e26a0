"""How many key blocks one kernel call takes, where one alone makes too small a tile.

A call costs its launch, the ramps of its thread blocks and a merge of its output, whatever it
computes. Fewer and larger calls save that, but the first of them waits for more messages. All
costs are counted in the FLOPs that a GPU does meanwhile.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.plans.cost import FLOPS_A_BYTE_ADDED, FLOPS_A_BYTE_WITHIN, KEYS_A_CALL, Shape
from megatron_burst.plans.mesh import Mesh
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.schedule import Schedule
from megatron_burst.plans.turn import Turn

_MORE = 2, 4
_WORTH = 0.95  # of the time with fewer; less is not worth the memory
_BACKWARD = 2.5  # FLOPs of attention's backward, in those of its forward


def with_larger_calls[Way: (Ring, Mesh)](
    way: Way, shape: Shape, asked: int | None, memory_limit: float, *, backward: bool
) -> Way:
    """Return it with as many blocks a call as are `asked` for, or as pay; see `why_single`."""
    if asked is not None:
        return replace(way, blocks_per_call=asked)
    sizes = shape.item_bytes(backward=backward)
    for blocks in _MORE:
        larger = replace(way, blocks_per_call=blocks)
        fits = larger.memory(sizes, backward=backward) <= memory_limit
        times = (time_of(each, shape, backward=backward) for each in (larger, way))
        if fits and is_worth(*times):
            way = larger
    return way


def time_of(way: Schedule, shape: Shape, *, backward: bool) -> float:
    """Return the time of a pass, in FLOPs: of all its turns, but not of messages between nodes."""
    turns = way.tiling.ranks / way.turn.length
    return turns * _Turn.of(way, shape, backward=backward).time(way.turn)


def is_worth(time: float, usual: float) -> bool:
    """Say whether a time saves so much of the usual one that more memory, or bytes, may go."""
    return time <= _WORTH * usual


def why_single(way: Schedule, shape: Shape, nodes: Sequence[Hashable], *, backward: bool) -> str:
    """Say why one call cannot take several of its blocks without a copy or a byte more, or "".

    They lie side by side if keys travel, of one sequence, and all is seen in full; they go straight
    from rank to rank, and their gradients back, if the links within each row of the grid are alike.
    """
    reasons = {
        "latents travel": shape.latents is not None,
        "a batch has several sequences": shape.tokens != way.tiling.local_tokens,
        "under this mask and layout blocks are seen in part": not way.tiling.key_chunk,
        "queries go around": way.sent is not Kind.KV,
        "fewer than three ranks share a node": way.turn.length < 3,
        "blocks or gradients go from rank to rank": not way.goes_straight(nodes, backward=backward),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


@dataclass(frozen=True, slots=True)
class _Turn:
    """What takes time while blocks go around one node, in FLOPs."""

    own: tuple[float, float]  # of the own tile, in the first and in the last step
    block: float  # of one block's tile, and of its sums, in the mean
    call: float  # beside its blocks
    read: float  # of a message
    result: float

    @classmethod
    def of(cls, way: Schedule, shape: Shape, *, backward: bool) -> "_Turn":
        """Reckon with means over the blocks of all ranks."""
        sizes, result = shape.item_bytes(backward=backward), way.sent.result(backward=backward)
        a_pair = 2.0 * shape.query_heads * (shape.head_dim + shape.value_head_dim)
        a_pair *= _BACKWARD if backward else 1.0
        pairs, queries, keys = way.tiling.mean_tile
        a_query, a_key, a_visitor = shape.added_bytes(backward=backward)
        tile, comes = pairs * a_pair, a_visitor if way.sent is Kind.QUERY else 0
        return cls(
            (tile / 2, tile / 2) if result else (tile, 0.0),
            tile + FLOPS_A_BYTE_ADDED * (keys * a_key + comes),
            queries * (KEYS_A_CALL * a_pair + FLOPS_A_BYTE_ADDED * a_query),
            float(FLOPS_A_BYTE_WITHIN * sizes[way.sent]),
            float(FLOPS_A_BYTE_WITHIN * sizes[way.of_one_step(result)]) if result else 0.0,
        )

    def time(self, turn: Turn) -> float:
        """Return it with the calls of a turn: in each step what takes longer counts."""
        calls, (first, last) = turn.calls, self.own
        computing = [first, *(size * self.block + self.call for size in calls), last]
        arriving, leaving = [*calls, 0, 0], [0, 0, *calls]
        steps = zip(computing, arriving, leaving, strict=True)
        return sum(max(c, self.read * a + self.result * b) for c, a, b in steps)
