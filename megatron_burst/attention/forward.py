"""The forward: blocks arrive while tiles are computed, and their outputs are merged."""

from torch import Tensor

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.kv import KeysAndValues
from megatron_burst.attention.launches import Launch
from megatron_burst.attention.loop import Blocks, run
from megatron_burst.attention.sums import PartialOutputs
from megatron_burst.plans.schedules.plan import Kind
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
        return call.kernel.forward(call.of_rows(launch, q, k, v, leaves_room))

    own: dict[Kind, Block] = {Kind.QUERY: (q,), Kind.KV: kv.sent}
    run("forward", plan, call.forward_launches, own, sums, call, attend)
    return sums.finish(sink)
