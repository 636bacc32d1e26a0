"""The forward loop, the same for every layout, mask and ring: the plan says what happens."""

from collections.abc import Mapping

from torch import Tensor

from megatron_burst.comm import Block
from megatron_burst.context import AttentionCall
from megatron_burst.plan import Item, Kind, Tile
from megatron_burst.ring_attention.merge import PartialResults


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return this rank's (out [B,S,H,dv], lse [B,H,S]); blocks travel while tiles are computed."""
    plan = call.forward_plan
    blocks: dict[Item, Block] = {
        Item(Kind.QUERY, plan.rank): (q,),
        Item(Kind.KV, plan.rank): (k, v),
    }
    results = PartialResults(q, v.shape[-1])
    flight = call.communicator.begin("forward", {Kind.KV: (k, v)})
    for number, step in enumerate(plan.steps):
        flight.post(number, step, blocks)
        for tile in step.tiles:
            results.add(tile.query_rows, *_attend(tile, blocks, call))
        blocks.update(flight.land(number))
    return results.finish()


def _attend(tile: Tile, blocks: Mapping[Item, Block], call: AttentionCall) -> tuple[Tensor, Tensor]:
    query_item, key_item = tile.blocks
    (q,), (k, v) = blocks[query_item], blocks[key_item]
    queries, keys = tile.query_rows.rows, tile.key_rows.rows
    return call.kernel.forward(q[:, queries], k[:, keys], v[:, keys], tile.relation, call.scale)
