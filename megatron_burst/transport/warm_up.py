"""Makes NCCL's communicators, and connects who will send to each other before they do.

Else both happened within the first step, at whatever message is the first of a pair. Gloo needs
neither: it connects all pairs when a group is made.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_burst.plans.schedules.plan import Channel, Plan, Send
from megatron_burst.transport.backend import nccl_of
from megatron_burst.transport.errors import named_errors
from megatron_burst.transport.nccl import MOST_PEERS

logger = logging.getLogger(__name__)


class Way(NamedTuple):
    """Messages to a peer, or from it; `peer` is the job's number of a rank."""

    channel: Channel
    sends: bool
    peer: int


class Connections:
    """Which ways of a rank NCCL has connected.

    Args:
        channels: a process group each.
        ranks: the job's number of each rank that the plans of a channel know by its place.
    """

    def __init__(
        self,
        channels: Mapping[Channel, dist.ProcessGroup],
        ranks: Mapping[Channel, Sequence[int]],
    ) -> None:
        by_nccl = ((c, nccl_of(channels[c])) for c in Channel if c in channels)
        self._backends = {c: backend for c, backend in by_nccl if backend is not None}
        self._channels, self._ranks, self._known = channels, ranks, set[Way]()
        self._rank = dist.get_rank() if self._backends else 0
        # A mesh of one node reads across it, too.
        across = {Channel.READ_ACROSS} if Channel.READ_BETWEEN in channels else set()
        self._direct = {Channel.READ_DIRECT, Channel.GRADIENT_DIRECT} | across

    def make(self, *, direct: bool = False) -> None:
        """Make the communicators but those of direct exchanges, or these; connect nobody.

        All members of each call it together.
        """
        missing = [
            (channel, backend)
            for channel, backend in self._backends.items()
            if (channel in self._direct) == direct and not backend._is_initialized()
        ]
        with _said_memory(len(missing), "communicators"):
            for channel, backend in missing:
                who = dist.get_process_group_ranks(self._channels[channel])
                with named_errors("at the start", f"meet ranks {who} for {channel}"):
                    backend.eager_connect_single_device(_device())

    def add(self, plans: Iterable[Plan], *, direct: bool = False) -> None:
        """Connect whom messages of the plans are between, unless earlier ones' were.

        A way is connected when a first plan has it, so both of its ends connect it in one call. A
        direct exchange may be one for a rank that has no message in it.
        """
        if direct:
            self.make(direct=True)
        ways = [way for way in self._ways(plans) if way not in self._known]
        self._known.update(ways)
        with _said_memory(len(ways), "connections"):
            for channel in self._backends:  # in one order on all ranks
                for part in self._batches(channel, [way for way in ways if way.channel is channel]):
                    self._connect(channel, part)

    def _ways(self, plans: Iterable[Plan]) -> Iterable[Way]:
        """Return each way once, in the order of the plans."""
        ways = dict[Way, None]()
        for each in (transfer for plan in plans for transfer in plan.transfers):
            if each.channel in self._backends:
                peer = self._ranks[each.channel][each.peer]
                ways[Way(each.channel, isinstance(each, Send), peer)] = None
        return ways

    def _batches(self, channel: Channel, ways: Sequence[Way]) -> list[list[Way]]:
        """Part them by how far the receiver is behind the sender: alike at both ends."""
        place = {rank: number for number, rank in enumerate(self._ranks[channel])}
        batches: dict[int, list[Way]] = {}
        for way in ways:
            behind = place[way.peer] - place[self._rank]
            number = (behind if way.sends else -behind) % len(place) // MOST_PEERS
            batches.setdefault(number, []).append(way)
        return [batches[number] for number in sorted(batches)]

    def _connect(self, channel: Channel, ways: Sequence[Way]) -> None:
        group, operations = self._channels[channel], list[dist.P2POp]()
        for _, sends, peer in ways:
            x = torch.zeros(1, dtype=torch.uint8, device=_device())
            operations.append(dist.P2POp(dist.isend if sends else dist.irecv, x, peer, group))
        who = ", ".join(map(str, dict.fromkeys(way.peer for way in ways)))
        with named_errors("at the start", f"connect to ranks {who} for {channel}"):
            for work in dist.batch_isend_irecv(operations):
                work.wait()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def _said_memory(number: int, what: str) -> Iterator[None]:
    """Log what NCCL takes in it of the GPU, whose allocator sees none of it."""
    before = torch.cuda.mem_get_info()[0] if number else 0
    yield
    if number and dist.get_rank() == 0:
        taken = (before - torch.cuda.mem_get_info()[0]) / 2**20
        logger.info("burst attention: NCCL takes %.0f MiB for %d %s", taken, number, what)
