"""Puts a rank's plan together: its steps and buffers.

It comes from the hops of all ranks, so that a send and its receive come from one line.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megatron_burst.plans.schedules.plan import (
    Hop,
    Item,
    Kind,
    Plan,
    Receive,
    Send,
    Step,
    Tiles,
)


def assemble(rank: int, hops: Iterable[Hop], tiles: Mapping[int, Sequence[Tiles]]) -> Plan:
    """Put together the plan of `rank` from the hops of all ranks and its own tiles, by step.

    Steps in which nothing happens are dropped. Hops that the two ends post in one step must come in
    one order, the same for all ranks.
    """
    ours = [hop for hop in hops if rank in (hop.source, hop.target)]
    found = {step: tuple(filter(len, blocks)) for step, blocks in tiles.items()}
    tiles = {step: blocks for step, blocks in found.items() if blocks}
    busy = {step for hop in ours for step in (hop.leaves, hop.lands)} | tiles.keys()
    number = {step: index for index, step in enumerate(sorted(busy))}
    buffers = _buffers(rank, ours, tiles)
    receives: dict[int, list[Receive]] = defaultdict(list)
    sends: dict[int, list[Send]] = defaultdict(list)
    for index, (item, source, target, channel, leaves, lands) in enumerate(ours):
        if target == rank:
            receive = Receive(item, source, channel, number[lands], buffers[index])
            receives[leaves].append(receive)
        else:
            sends[leaves].append(Send(item, target, channel, number[lands]))
    return Plan(
        rank,
        tuple(
            Step(tuple(receives[step]), tuple(sends[step]), found.get(step, ())) for step in number
        ),
    )


def _buffers(
    rank: int, hops: Sequence[Hop], tiles: Mapping[int, Sequence[Tiles]]
) -> dict[int, int]:
    """Give each message that arrives, by number, the first buffer of its kind that is free then."""
    last_use = _last_uses(rank, hops, tiles)
    ends: dict[Kind, list[int]] = defaultdict(list)  # the last step that needs each buffer
    given: dict[int, int] = {}
    for number in sorted(last_use, key=lambda number: (hops[number].leaves, number)):
        busy, leaves = ends[hops[number].item.kind], hops[number].leaves
        given[number] = next((n for n, end in enumerate(busy) if end < leaves), len(busy))
        busy[given[number] : given[number] + 1] = [last_use[number]]
    return given


def _last_uses(
    rank: int, hops: Sequence[Hop], tiles: Mapping[int, Sequence[Tiles]]
) -> dict[int, int]:
    """Return for each message that arrives, by number, the last step that needs its buffer.

    A block stays for its tiles and until its sends have landed, or until it has landed again. A
    result is added at once.
    """
    order = [number for number, hop in enumerate(hops) if hop.target == rank]
    order.sort(key=lambda number: (hops[number].lands, hops[number].leaves))
    arrivals: dict[Item, list[int]] = defaultdict(list)
    for number in order:
        arrivals[hops[number].item].append(number)
    last = {number: hops[number].lands for number in order}
    met = ((step, block) for step, blocks in tiles.items() for block in blocks)
    blocks = {(step, item) for step, block in met for item in block.blocks}
    uses = [(step, step, item) for step, item in blocks if item.owner != rank]  # own ones stay
    passed_on = (hop for hop in hops if hop.source == rank != hop.item.owner)
    uses += [(hop.leaves, hop.lands, hop.item) for hop in passed_on if not hop.item.kind.is_result]
    for begins, ends, item in uses:
        if there := [n for n in arrivals.get(item, ()) if hops[n].lands < begins]:
            last[there[-1]] = max(last[there[-1]], ends)
    return last
