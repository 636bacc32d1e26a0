"""Puts a rank's plan together: its steps and buffers.

It comes from the hops of all ranks, so that a send and its receive come from one line.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from megatron_burst.plans.plan import (
    Hop,
    Item,
    Kind,
    Plan,
    Receive,
    Send,
    Step,
    Tile,
    Tiles,
    by_blocks,
    joined,
)


class _Buffer(NamedTuple):
    """Where a message lands, the last fields of a `Receive`."""

    number: int
    place: int
    places: int


def assemble(
    rank: int, hops: Iterable[Hop], tiles: Mapping[int, Sequence[Tile]], chunk: int = 0
) -> Plan:
    """Put together the plan of `rank` from the hops of all ranks and its own tiles, by step.

    Steps in which nothing happens are dropped. Hops that the two ends post in one step must come in
    one order, the same for all ranks.
    """
    ours = [hop for hop in hops if rank in (hop.source, hop.target)]
    tiles = {step: some for step, some in tiles.items() if some}
    busy = {step for hop in ours for step in (hop.leaves, hop.lands)} | tiles.keys()
    number = {step: index for index, step in enumerate(sorted(busy))}
    buffers = _buffers(rank, ours, tiles, joins=chunk > 0)
    receives: dict[int, list[Receive]] = defaultdict(list)
    sends: dict[int, list[Send]] = defaultdict(list)
    for index, (item, source, target, channel, leaves, lands) in enumerate(ours):
        if target == rank:
            receive = Receive(item, source, channel, number[lands], *buffers[index])
            receives[leaves].append(receive)
        else:
            sends[leaves].append(Send(item, target, channel, number[lands]))
    return Plan(
        rank,
        tuple(
            Step(tuple(receives[step]), tuple(sends[step]), tiles.get(step, ())) for step in number
        ),
        chunk,
    )


def _buffers(
    rank: int, hops: Sequence[Hop], tiles: Mapping[int, Sequence[Tile]], *, joins: bool
) -> dict[int, _Buffer]:
    """Give each message that arrives, by number, a buffer of its kind that is free then.

    It is the first of these. Blocks that lie side by side, which are posted in one step, share
    theirs, and those of which there are most come first: no buffer is too small for what follows.
    """
    met = {step: by_blocks(some) for step, some in tiles.items()}
    last_use = _last_uses(rank, hops, met)
    beside = _side_by_side(met) if joins else {}
    uses = {number: _use_of(hops[number], number, beside) for number in sorted(last_use)}
    steps: dict[Hashable, int] = defaultdict(int)  # in which it is needed: a bit each
    for number, use in uses.items():
        steps[use.blocks] |= (2 << last_use[number]) - (1 << hops[number].leaves)
    busy: dict[Kind, list[int]] = defaultdict(list)  # the steps of each buffer
    given: dict[Hashable, int] = {}
    for number in sorted(uses, key=lambda number: (-uses[number].places, hops[number].leaves)):
        if (blocks := uses[number].blocks) not in given:
            given[blocks] = _take(busy[hops[number].item.kind], steps[blocks])
    return {number: _Buffer(given[use.blocks], *use[2:]) for number, use in uses.items()}


def _take(busy: list[int], steps: int) -> int:
    """Return the number of the first buffer that is free in these steps, and busy from now on."""
    number = next((n for n, taken in enumerate(busy) if not taken & steps), len(busy))
    if number == len(busy):
        busy.append(0)
    busy[number] |= steps
    return number


class _Use(NamedTuple):
    """Of a block in a kernel call."""

    step: int
    blocks: Hashable  # that lie side by side
    place: int
    places: int


def _use_of(hop: Hop, number: int, beside: Mapping[Item, Sequence[_Use]]) -> _Use:
    """Return the call that reads what arrives next, or of what is not read the message's own."""
    alone = _Use(hop.lands + 1, number, 0, 1)
    return next((use for use in beside.get(hop.item, ()) if use.step > hop.lands), alone)


def _side_by_side(met: Mapping[int, Sequence[Tiles]]) -> dict[Item, list[_Use]]:
    """Return the calls that read each block, in their order; of one alone its own key."""
    uses: dict[Item, list[_Use]] = defaultdict(list)
    for step in sorted(met):
        for some in joined(met[step]):
            blocks = some.key_blocks
            for place, item in enumerate(blocks):
                uses[item].append(_Use(step, (step, *blocks), place, len(blocks)))
    return uses


def _last_uses(
    rank: int, hops: Sequence[Hop], met: Mapping[int, Sequence[Tiles]]
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
    blocks = {(step, item) for step in met for some in met[step] for item in some.blocks}
    uses = [(step, step, item) for step, item in blocks if item.owner != rank]  # own ones stay
    passed_on = (hop for hop in hops if hop.source == rank != hop.item.owner)
    uses += [(hop.leaves, hop.lands, hop.item) for hop in passed_on if not hop.item.kind.is_result]
    for begins, ends, item in uses:
        if there := [n for n in arrivals.get(item, ()) if hops[n].lands < begins]:
            last[there[-1]] = max(last[there[-1]], ends)
    return last
