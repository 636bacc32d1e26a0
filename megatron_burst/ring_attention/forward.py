"""The forward loop, the same for every layout, mask and ring: the plan says what happens."""

from torch import Tensor

from megatron_burst.context import AttentionCall
from megatron_burst.plan import Item, Kind
from megatron_burst.ring_attention.merge import PartialResults


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return this rank's (out [B,S,H,dv], lse [B,H,S]); blocks travel while tiles are computed."""
    rank = call.forward_plan.rank
    blocks = {
        Item(Kind.QUERY, rank): (q,),
        Item(Kind.KV, rank): (k, v),
    }
    results = PartialResults(q, v.shape[-1])
    for number, step in enumerate(call.forward_plan.steps):
        travelling = call.communicator.post(
            step, f"forward step {number}", blocks, like={Kind.KV: (k, v)}
        )
        for tile in step.tiles:
            (query,) = blocks[Item(Kind.QUERY, tile.query_owner)]
            key, value = blocks[Item(Kind.KV, tile.key_owner)]
            out, lse = call.kernel.forward(
                query[:, tile.query_rows.rows],
                key[:, tile.key_rows.rows],
                value[:, tile.key_rows.rows],
                tile.relation,
                call.scale,
            )
            results.add(tile.query_rows, out, lse)
        blocks.update(travelling.wait())
        for item in step.release:
            del blocks[item]
    return results.finish()
