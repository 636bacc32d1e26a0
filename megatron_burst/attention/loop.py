"""The loop over a plan, the same for every layout, mask and ring: the plan says what happens."""

from collections.abc import Callable, Mapping

from megatron_burst.attention.call import AttentionPlan
from megatron_burst.attention.launches import Launch, Launches, rows_of
from megatron_burst.attention.sums import Sums
from megatron_burst.plans.schedules.plan import Item, Kind, Plan
from megatron_burst.transport.lowered import Block, Form, forms_of
from megatron_burst.transport.memory import write
from megatron_burst.transport.profiling import span

type Blocks = Mapping[Item, Block]


def run(
    name: str,
    plan: Plan,
    calls: Launches,
    own: Mapping[Kind, Block],
    sums: Sums,
    call: AttentionPlan,
    compute: Callable[[Launch, Blocks, bool], Block],
) -> None:
    """Add up what `compute` makes of blocks that arrive meanwhile, and what others send of it.

    Args:
        name: of the pass, for errors and profiles.
        plan: who sends what when.
        calls: of the kernel, by step.
        own: the blocks of this rank.
        sums: where results are added, its own and those that go to others.
        call: whose transport and parts these are.
        compute: makes a kernel call, of which it is told whether to leave room for messages.
    """

    def forms(item: Item) -> list[Form]:
        return sums.forms(item) if item.kind.is_result else forms_of(of_rows(item))

    def of_rows(item: Item) -> Block:
        return rows_of(own[item.kind], item.packed)

    blocks = {Item(kind, plan.rank): block for kind, block in own.items()}
    lowered = call.lowered(name, plan, forms)
    with call.communicator.transfers(lowered, own, next(iter(own.values()))[0].device) as transfers:
        for number in range(len(plan.steps)):
            for item, into in transfers.writes(number):
                if item.kind.is_result:
                    sums.hand_on(item, into)
                else:
                    write(into, rows_of(own[item.kind], call.parts.get(item.part)))
            transfers.post(number)
            for launch in calls[number]:
                sums.make_room(launch)
                with span(name, number, "tile", launch.tile.query_owner, launch.tile.key_owner):
                    results = compute(launch, blocks, call.leaves_room and transfers.are_under_way)
                with span(name, number, "merge"):
                    sums.collect(launch, results)
                del results  # else they would live beside the next call's
            sums.end_step()
            for item, block in transfers.land(number):
                if item.kind.is_result:
                    with span(name, number, "merge"):
                        sums.take(item, block, call.parts)
                else:
                    blocks[item] = block
