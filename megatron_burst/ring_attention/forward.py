"""The forward loop, the same for every layout, mask and ring: the plan says what happens."""

from collections.abc import Mapping

from torch import Tensor

from megatron_burst.comm import Block
from megatron_burst.context import AttentionCall
from megatron_burst.plan import Item, Kind, Tile, blocks_of_tile
from megatron_burst.ring_attention.merge import PartialResults


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return this rank's (out [B,S,H,dv], lse [B,H,S]); blocks travel while tiles are computed."""
    rank = call.forward_plan.rank
    blocks: dict[Item, Block] = {
        Item(Kind.QUERY, rank): (q,),
        Item(Kind.KV, rank): (k, v),
    }
    results = PartialResults(q, v.shape[-1])
    for number, step in enumerate(call.forward_plan.steps):
        travelling = call.communicator.post(
            step, f"forward step {number}", blocks, like={Kind.KV: (k, v)}
        )
        for tile in step.tiles:
            results.add(tile.query_rows, *_attend(tile, blocks, call))
        blocks.update(travelling.wait())
        for item in step.release:
            del blocks[item]
    return results.finish()


def _attend(tile: Tile, blocks: Mapping[Item, Block], call: AttentionCall) -> tuple[Tensor, Tensor]:
    # In a function of its own, so that no local name keeps a block alive into the next step.
    query_item, key_item = blocks_of_tile(tile)
    (q,), (k, v) = blocks[query_item], blocks[key_item]
    queries, keys = tile.query_rows.rows, tile.key_rows.rows
    return call.kernel.forward(q[:, queries], k[:, keys], v[:, keys], tile.relation, call.scale)
