"""The backward: blocks are sent as in the forward, and gradients to the blocks' owners."""

from torch import Tensor

from megatron_burst.attention.call import AttentionCall
from megatron_burst.attention.keys import Keys
from megatron_burst.attention.loop import Blocks, run
from megatron_burst.attention.rows import DeviceCall, rows_of
from megatron_burst.attention.surrogate import surrogate_factor, surrogate_output
from megatron_burst.plans.plan import Item, Kind
from megatron_burst.transport.comm import Block


def backward(
    dout: Tensor, q: Tensor, keys: Keys, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of this rank's q, k, v and latent in the dtype of q."""
    plan = call.backward_plan
    query: Block = (q, dout, lse)
    moved = {send.item.kind for send in plan.sends} | {r.item.kind for r in plan.receives}
    if Kind.QUERY in moved:
        query = (q, dout, lse.contiguous(), surrogate_factor(dout, out))  # as messages are
    outputs = _Outputs(Item(Kind.QUERY, plan.rank), out)
    sums = keys.sums(q, call.wire)

    def differentiate(some: DeviceCall, blocks: Blocks, leaves_room: bool) -> Block:
        query_item, key_item = some.tile.blocks
        q, dout, lse, *_ = blocks[query_item]
        out = outputs.of(query_item, blocks[query_item])
        k, v = keys.read(key_item, blocks[key_item])
        finished = rows_of((dout, out, lse), some.queries)
        return call.kernel.backward(call.of_rows(some, q, k, v), *finished)

    own = {Kind.QUERY: query, Kind.KV: keys.sent}
    run("backward", plan, call.backward_calls, own, sums, call, differentiate)
    (dq,), (dk, dv, dlatent) = sums.total(Item(Kind.D_QUERY, plan.rank)), keys.gradients(sums)
    dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, None if dlatent is None else dlatent.to(q.dtype)


class _Outputs:
    """The output of the queries at hand: the true one of the own, a surrogate for visitors'."""

    def __init__(self, own: Item, out: Tensor) -> None:
        self._own, self._out = own, out
        self._visitor, self._surrogate = own, out

    def of(self, item: Item, block: Block) -> Tensor:
        """Return what serves a kernel as the output of the query block `item`."""
        if item == self._own:
            return self._out
        if item != self._visitor:
            _, dout, _, factor = block
            self._visitor, self._surrogate = item, self._out  # the last one is freed first
            self._surrogate = surrogate_output(dout, factor)
        return self._surrogate
