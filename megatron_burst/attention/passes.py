"""What a kernel call is in the forward, and in the backward of a call.

There blocks are sent as in the forward, and gradients to the blocks' owners.
"""

from torch import Tensor

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.kv import KeysAndValues
from megatron_burst.attention.launches import Launch, rows_of
from megatron_burst.attention.loop import Blocks, run
from megatron_burst.attention.saved import is_selective
from megatron_burst.attention.sums import PartialOutputs
from megatron_burst.attention.surrogate import surrogate_factor, surrogate_output
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.transport.lowered import Block


def forward(
    q: Tensor, kv: KeysAndValues, call: AttentionPlan, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out [B,S,H,dv], lse [B,H,S])."""
    plan = call.forward_plan
    sums = PartialOutputs(plan.rank, q, kv.own[1].shape[-1])

    def attend(launch: Launch, blocks: Blocks, leaves_room: bool) -> Block:
        query_item, key_item = launch.tile.blocks
        (q,), (k, v) = blocks[query_item], kv.read(key_item, blocks[key_item])
        out, lse = call.kernel.forward(call.of_rows(launch, q, k, v, leaves_room))
        return (out.clone(), lse.clone()) if is_selective() else (out, lse)

    own: dict[Kind, Block] = {Kind.QUERY: (q,), Kind.KV: kv.sent}
    run("forward", plan, call.forward_launches, own, sums, call, attend)
    return sums.finish(sink)


def backward(
    dout: Tensor, q: Tensor, kv: KeysAndValues, out: Tensor, lse: Tensor, call: AttentionPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of this rank's q, k, v and latent in the dtype of q."""
    plan = call.backward_plan
    query: Block = (q, dout, lse)
    if call.moves_queries:
        query = (q, dout, lse, surrogate_factor(dout, out))
    surrogates: dict[Item, Tensor] = {}  # the last visitor's alone
    sums = kv.sums(q, call.wire)

    def differentiate(launch: Launch, blocks: Blocks, leaves_room: bool) -> Block:
        query_item, key_item = launch.tile.blocks
        q, dout, lse, *factor = blocks[query_item]
        if query_item.owner != plan.rank and query_item not in surrogates:
            surrogates.clear()  # before the next one is made
            surrogates[query_item] = surrogate_output(dout, *factor)
        k, v = kv.read(key_item, blocks[key_item])
        finished = dout, surrogates.get(query_item, out), lse
        tile = call.of_rows(launch, q, k, v)
        return call.kernel.backward(tile, *rows_of(finished, launch.queries))

    own = {Kind.QUERY: query, Kind.KV: kv.sent}
    run("backward", plan, call.backward_launches, own, sums, call, differentiate)
    own_sums = (Item(kind, plan.rank) for kind in (Kind.D_QUERY, Kind.D_KV))
    dq, dk, dv, *dlatent = (x for item in own_sums for x in sums.release(item, q.dtype))
    return dq, dk, dv, dlatent[0] if dlatent else None
