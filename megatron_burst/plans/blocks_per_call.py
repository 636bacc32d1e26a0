"""How many key blocks one kernel call takes, where one alone makes too small a tile.

A call costs its launch, the ramps of its thread blocks and a merge of its output, whatever it
computes. Fewer and larger calls save that, but the first of them waits for more messages. All
costs are counted in the FLOPs that a GPU does meanwhile.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.config import GradientReturn
from megatron_burst.plans.cost import FLOPS_A_BYTE_ADDED, FLOPS_A_BYTE_WITHIN, KEYS_A_CALL, Shape
from megatron_burst.plans.mesh import Mesh
from megatron_burst.plans.plan import Kind
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.turn import Turn

_MORE = 2, 4
_WORTH = 0.95  # of the time with fewer; less is not worth the memory
_BACKWARD = 2.5  # FLOPs of attention's backward, in those of its forward


def with_larger_calls[Way: (Ring, Mesh)](
    way: Way, shape: Shape, asked: int | None, memory_limit: float, *, backward: bool
) -> Way:
    """Return it with as many blocks a call as are `asked` for, or as pay; see `can_share`."""
    if asked is not None:
        return replace(way, blocks_per_call=asked)
    sizes = shape.item_bytes(backward=backward)
    time = _Turn.of(way, shape, backward=backward)
    for blocks in _MORE:
        larger = replace(way, blocks_per_call=blocks)
        fits = larger.memory(sizes, backward=backward) <= memory_limit
        usual = time.with_calls_of(way.blocks_per_call)
        if fits and time.with_calls_of(blocks) <= _WORTH * usual:
            way = larger
    return way


def can_share(way: Ring | Mesh, shape: Shape, nodes: Sequence[Hashable], *, backward: bool) -> bool:
    """Say whether one call can take several of its blocks, without a copy or a byte more.

    They lie side by side if keys travel, of one sequence, and all is seen in full; they go straight
    from rank to rank, and their gradients back, if the links within each row of the grid are alike.
    """
    one_sequence = shape.tokens == way.tiling.local_tokens and shape.latents is None
    seen_in_full = way.tiling.key_chunk > 0
    several = way.sent is Kind.KV and way.turn.length > 2
    return several and one_sequence and seen_in_full and _go_straight(way, nodes, backward)


def _go_straight(way: Ring | Mesh, nodes: Sequence[Hashable], backward: bool) -> bool:
    """In a mesh without nodes all do; blocks stay, so all that visit must see them alike."""
    if isinstance(way, Ring) and backward and way.gradient_return is not GradientReturn.HOME:
        return False
    if isinstance(way, Mesh) and way.table.locals == 1:
        return [*way.table.ranks.flat] == [*range(way.grid.ranks)]
    return all(len({nodes[rank] for rank in row}) == 1 for row in way.grid.rows)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The time of the steps in which blocks go around one node, in FLOPs."""

    length: int  # in blocks
    own: tuple[float, float]  # of the own tile, in the first and in the last step
    tile: float  # of one block's, in the mean
    call: float  # beside its tiles
    read: float  # of a message
    gradient: float

    @classmethod
    def of(cls, way: Ring | Mesh, shape: Shape, *, backward: bool) -> "_Turn":
        """Reckon with means over the blocks of all ranks."""
        tiling, returned = way.tiling, way.of_one_step(Kind.D_KV)
        sizes = shape.item_bytes(backward=backward)
        a_pair = 2.0 * shape.query_heads * (shape.head_dim + shape.value_head_dim)
        output = shape.query_heads * shape.value_head_dim
        if backward:
            a_pair, output = _BACKWARD * a_pair, shape.query_heads * shape.head_dim
        added = output * (shape.element_bytes + 8) * FLOPS_A_BYTE_ADDED
        tile = float(tiling.needs.pairs.mean() * a_pair)
        return cls(
            way.turn.length,
            (tile / 2, tile / 2) if backward else (tile, 0.0),
            tile,
            tiling.query_rows * (KEYS_A_CALL * a_pair + added),
            float(FLOPS_A_BYTE_WITHIN * sizes[Kind.KV]),
            float(FLOPS_A_BYTE_WITHIN * sizes[returned]) if backward else 0.0,
        )

    def with_calls_of(self, blocks: int) -> float:
        """Return it with so many blocks a call: in each step what takes longer counts."""
        calls = Turn(self.length, blocks).calls
        first, last = self.own
        computing = [first, *(size * self.tile + self.call for size in calls), last]
        arriving, leaving = [*calls, 0, 0], [0, 0, *calls]
        steps = zip(computing, arriving, leaving, strict=True)
        return sum(max(c, self.read * a + self.gradient * b) for c, a, b in steps)
