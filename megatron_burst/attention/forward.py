"""The forward loop, the same for every layout, mask and ring: the plan says what happens."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from megatron_burst.attention.call import AttentionCall
from megatron_burst.attention.keys import Keys
from megatron_burst.attention.merge import PartialOutputs
from megatron_burst.attention.rows import DeviceCall, Parts, rows_of
from megatron_burst.plans.plan import Item, Kind, Plan
from megatron_burst.transport.comm import Block
from megatron_burst.transport.profiling import span


def forward(
    q: Tensor, keys: Keys, call: AttentionCall, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return this rank's (out [B,S,H,dv], lse [B,H,S]); blocks arrive while tiles are computed."""
    plan = call.forward_plan
    blocks: dict[Item, Block] = {
        Item(Kind.QUERY, plan.rank): (q,),
        Item(Kind.KV, plan.rank): keys.sent,
    }
    own, results = dict(blocks), PartialOutputs(plan.rank, q, keys.own[1].shape[-1])
    blocks |= parts_to_send(plan, blocks, call.parts)

    def template(item: Item) -> Block:
        if item.kind.is_result:
            return results.template(item)
        return rows_of(own[Item(item.kind, plan.rank)], item.packed)

    transfers = call.communicator.begin("forward", plan, template)
    for number, step in enumerate(plan.steps):
        transfers.post(number, step, blocks | results.hand_on(step.sends))
        for some in call.forward_calls[number]:
            results.make_room(some.tile.output)
            with span("forward", number, "tile", some.tile.query_owner, some.tile.key_owner):
                room = call.leaves_room and transfers.are_under_way
                partial = _attend(some, blocks, keys, call, room)
            with span("forward", number, "merge"):
                results.add(some.tile.output, some.queries, *partial)
            del partial  # else it would live beside the next call's
        for item, block in transfers.land(number):
            if item.kind.is_result:
                with span("forward", number, "merge"):
                    results.take(item, block, call.parts)
            else:
                blocks[item] = block
    return results.finish(sink)


def _attend(
    some: DeviceCall, blocks: Mapping[Item, Block], keys: Keys, call: AttentionCall, room: bool
) -> tuple[Tensor, Tensor]:
    query_item, key_item = some.tile.blocks
    (q,), (k, v) = blocks[query_item], keys.read(key_item, blocks[key_item])
    return call.kernel.forward(replace(call.of_rows(some, q, k, v), leaves_room=room))


def parts_to_send(plan: Plan, blocks: Mapping[Item, Block], parts: Parts) -> dict[Item, Block]:
    """Cut what leaves in parts out of the rank's own blocks; messages are contiguous."""
    items = {send.item for send in plan.sends if not send.item.kind.is_result}
    return {
        item: tuple(t.contiguous() for t in rows_of(blocks[Item(*item[:2])], parts[item.part]))
        for item in items
        if item.owner == plan.rank and item.part
    }
