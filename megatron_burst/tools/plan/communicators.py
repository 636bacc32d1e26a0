"""The communicators of a layer's attention: messages and bytes of a rank, and the rates in reach.

Each has the ranks that its messages are between, and no others: a row of the grid, which is a node
or in a flat ring all ranks, a column of it, for what goes from corner to corner all of it, and
those of an all-to-all. Training's clock has messages at the rates of the links: of up to 256 ranks
with 4096 tokens each and more, what it takes is on the channels at most 1 % slower than the best;
with 1024 up to 63 %, or 30 % where the host's time of the hops counts.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.ctas import max_ctas
from megatron_burst.plans.choice.machine import Machine
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.tools.plan.nccl import Communicator, Peers, communicator
from megatron_burst.tools.plan.workload import Ring

_COLUMN = Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN
_CORNER = Channel.READ_DIRECT, Channel.GRADIENT_DIRECT


@dataclass(frozen=True, slots=True)
class Use:
    """A rank's messages on a communicator, forward and backward of one chunk of the heads."""

    communicator: Communicator
    peers: Peers
    sent: int  # messages
    largest: int  # bytes
    at_once: int  # that are posted before a step, at the most

    @property
    def channels(self) -> int:
        """Of the largest message."""
        return int(self.communicator.channels_of(np.array(self.largest)))

    @property
    def ctas(self) -> int:
        """Thread blocks of the messages that are posted together."""
        return min(self.communicator.channels, self.at_once * self.channels)

    @property
    def buffers(self) -> int:
        """Bytes."""
        return self.communicator.buffers(self.peers)


def made_for(ring: Ring, channel: Channel) -> Communicator:
    """Return what NCCL decides for the ranks that such messages are between."""
    machine, nodes = ring.machine, len({*ring.nodes})
    whole = nodes, len(ring.nodes) // nodes
    if channel is Channel.HEADS:
        where = max(1, ring.heads // ring.local), min(ring.heads, ring.local)
    elif channel in _COLUMN:
        where = nodes, 1
    else:
        where = whole if ring.grid.nodes == 1 or channel in _CORNER else (1, whole[1])
    ranks = where[0] * where[1]
    return communicator(machine, *where, max_ctas(channel, ranks, machine.gpus_per_node))


class _Message(NamedTuple):
    posted: tuple[int, int]  # pass and step, alike for those that are posted together
    peer: int
    is_sent: bool
    is_far: bool
    size: int


def uses(ring: Ring, schedules: tuple[Schedule, Schedule], shape: Shape) -> Mapping[Channel, Use]:
    """Count the messages of the rank in the middle in both passes: of blocks, and of results.

    Nothing where the links are not known.
    """
    if not ring.machine.nvlinks:
        return {}
    nodes, rank = ring.nodes, len(ring.nodes) // 2
    messages = defaultdict[Channel, list[_Message]](list)
    for backward, schedule in enumerate(schedules):
        sizes, local = shape.item_bytes(backward=bool(backward)), schedule.tiling.local_tokens
        for hop in schedule.hops(rank, backward=bool(backward)):
            is_sent = hop.source == rank
            peer, part = hop.target if is_sent else hop.source, hop.item.packed
            size = sizes[hop.item.kind] * (part.length if part else local) // local
            posted, is_far = (backward, hop.leaves), nodes[peer] != nodes[rank]
            messages[hop.channel].append(_Message(posted, peer, is_sent, is_far, size))
    used = {key: _use(made_for(ring, key), of_channel) for key, of_channel in messages.items()}
    return used | ({Channel.HEADS: _of_heads(ring)} if ring.heads > 1 else {})


def _use(group: Communicator, messages: list[_Message]) -> Use:
    ways = ((is_sent, is_far) for is_far in (False, True) for is_sent in (False, True))
    peers = [
        len({each.peer for each in messages if (each.is_sent, each.is_far) == way}) for way in ways
    ]
    posted = [each.posted for each in messages if each.is_sent]
    at_once = max(map(posted.count, {*posted}), default=0)
    return Use(group, Peers(*peers), len(posted), max(each.size for each in messages), at_once)


def _of_heads(ring: Ring) -> Use:
    """Two all-to-alls a pass: of q, k and v, and of the output."""
    others, near = ring.heads - 1, min(ring.heads, ring.local) - 1
    peers = Peers(near, near, others - near, others - near)
    return Use(made_for(ring, Channel.HEADS), peers, 4 * others, _share_of_heads(ring), others)


def _share_of_heads(ring: Ring) -> int:
    """Bytes to a peer of an all-to-all: of q, k and v, or the output, in the mean."""
    return ring.shape.exchange_bytes(ring.heads) // (ring.heads - 1) // 2


@lru_cache(maxsize=256)
def reached(ring: Ring, schedule: Schedule, shape: Shape, *, backward: bool) -> Machine:
    """Return the machine with the rate that a pass's messages within nodes reach.

    That of the channels they have, in the mean over their bytes; messages that are posted together
    share what all of them reach. Between nodes the NIC's rate stays: NCCL counts on 14 GB/s of a
    channel, and steps were published that need more.
    """
    machine = ring.machine
    if not machine.nvlinks:
        return machine
    node, after = np.array([(at, ring.grid.after(n)) for n, at in enumerate(ring.nodes)]).T
    sizes, moved, seconds = shape.item_bytes(backward=backward), 0.0, 0.0
    for messages in schedule.messages(backward=backward):
        loads = messages.loads(sizes, schedule.tiling.local_tokens)
        goes = (node[loads.sources] == node[loads.targets]) & (loads.sizes > 0)
        if not goes.any():
            continue
        is_result = next(iter(messages.hops(0) or messages.hops())).item.kind.is_result
        legs, steps = goes.any(axis=1), loads.leaves
        together = np.bincount(steps[legs], minlength=1 + max(steps, default=0))[steps]
        reads = Channel.READ_WITHIN, Channel.READ_ACROSS
        ways = (Channel.GRADIENT_WITHIN,) * 2 if is_result else reads
        to_next, to_others = (
            np.minimum(x.channels, together[:, None] * x.channels_of(loads.sizes))
            for x in (made_for(ring, way) for way in ways)
        )
        channels = np.where(after[loads.sources] == loads.targets, to_next, to_others)
        moved += loads.sizes[goes].sum()
        rates = np.minimum(machine.within_rate, channels[goes] * machine.channel_rate)
        seconds += (loads.sizes[goes] / rates).sum()
    return replace(machine, within_rate=moved / seconds) if moved else machine


def reached_by_heads(ring: Ring) -> Machine:
    """Return the machine with the rate of the all-to-alls over heads within nodes."""
    machine = ring.machine
    peers = min(ring.heads, ring.local) - 1
    if not machine.nvlinks or not peers:
        return machine
    group = made_for(ring, Channel.HEADS)
    a_peer = int(group.channels_of(np.array(_share_of_heads(ring))))
    rate = min(group.channels, peers * a_peer) * machine.channel_rate
    return replace(machine, within_rate=min(machine.within_rate, rate))
