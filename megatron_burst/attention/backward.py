"""The backward loop: blocks are sent as in the forward, and gradients to the blocks' owners."""

from collections.abc import Mapping

from torch import Tensor

from megatron_burst.attention.call import AttentionCall
from megatron_burst.attention.forward import parts_to_send
from megatron_burst.attention.keys import Keys
from megatron_burst.attention.rows import DeviceCall, by_key_block, rows_of
from megatron_burst.attention.surrogate import surrogate_factor, surrogate_output
from megatron_burst.plans.plan import Item, Kind
from megatron_burst.transport.comm import Block
from megatron_burst.transport.profiling import span


def backward(
    dout: Tensor, q: Tensor, keys: Keys, out: Tensor, lse: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of this rank's q, k, v and latent in the dtype of q."""
    plan = call.backward_plan
    query: Block = (q, dout, lse)
    moved = {send.item.kind for send in plan.sends} | {r.item.kind for r in plan.receives}
    if Kind.QUERY in moved:
        query = (q, dout, lse.contiguous(), surrogate_factor(dout, out))  # as messages are
    own = {Kind.QUERY: query, Kind.KV: keys.sent}
    blocks = {Item(kind, plan.rank): block for kind, block in own.items()}
    blocks |= parts_to_send(plan, blocks, call.parts)
    outputs = _Outputs(Item(Kind.QUERY, plan.rank), out)
    sums = keys.sums(q, call.wire)

    def template(item: Item) -> Block:
        return sums.template(item) if item.kind.is_result else rows_of(own[item.kind], item.packed)

    transfers = call.communicator.begin("backward", plan, template)
    for number, step in enumerate(plan.steps):
        transfers.post(number, step, blocks | sums.hand_on(step.sends))
        for some in call.backward_calls[number]:
            with span("backward", number, "tile", some.tile.query_owner, some.tile.key_owner):
                dq, dk, dv = _differentiate(some, blocks, keys, outputs, call)
            with span("backward", number, "merge"):
                sums.add(some.tile.gradients[0], some.queries, (dq,))
                for gradient in by_key_block(some, (dk, dv), plan.chunk):
                    sums.add(*gradient)
            del dq, dk, dv, gradient  # else they would live beside the next call's
        sums.end_step()
        for item, block in transfers.land(number):
            if item.kind.is_result:
                with span("backward", number, "merge"):
                    sums.take(item, block, call.parts)
            else:
                blocks[item] = block
    (dq,), (dk, dv, dlatent) = sums.total(Item(Kind.D_QUERY, plan.rank)), keys.gradients(sums)
    dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, None if dlatent is None else dlatent.to(q.dtype)


def _differentiate(
    some: DeviceCall,
    blocks: Mapping[Item, Block],
    keys: Keys,
    outputs: "_Outputs",
    call: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor]:
    query_item, key_item = some.tile.blocks
    q, dout, lse, *_ = blocks[query_item]
    out = outputs.of(query_item, blocks[query_item])
    k, v = keys.read(key_item, blocks[key_item])
    finished = rows_of((dout, out, lse), some.queries)
    return call.kernel.backward(call.of_rows(some, q, k, v), *finished)


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
