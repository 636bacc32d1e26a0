"""Carries out the transfers of a plan and names what failed when one does.

All messages that a step posts on a channel go out at once, receives first: gloo needs a buffer for
what arrives, and NCCL takes them as one group. Both ends post in the order of the plan.

On NCCL a message runs on the stream of its channel's communicator: posting it waits for the work
queued so far, waiting for it makes the current stream wait, and the host goes on in both cases.
"""

import copy
import datetime
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Plan, Receive, Send, Step
from megatron_burst.transport.agreement import Agreement
from megatron_burst.transport.backend import is_by_gloo, nccl_limit
from megatron_burst.transport.errors import CommunicationError, named_errors
from megatron_burst.transport.pinned import pinned_like
from megatron_burst.transport.profiling import span
from megatron_burst.transport.watchdog import Watchdog

_CHANNELS = list(Channel)

type Block = tuple[Tensor, ...]  # the tensors of an item
type _Work = tuple[str, dist.Work, datetime.timedelta | None]  # with what it does; its time limit

_NEVER = 2  # a tag that no message has
_AT_ONCE = datetime.timedelta(milliseconds=1)


class Communicator:
    """The transport of one context-parallel group; counts the payload bytes that it sends."""

    def __init__(
        self,
        ranks: Sequence[int],  # the job's number of each rank of the group
        channels: Mapping[Channel, dist.ProcessGroup],  # empty for a process that has no peer
        timeout_seconds: float,  # how long a message may take
        agreement: Agreement | None = None,  # None: nobody to agree with
    ) -> None:
        self._ranks, self._channels, self.agreement = ranks, channels, agreement
        self._numbers: Sequence[int] = range(len(ranks))  # of the ranks in the group
        every = channels.values()
        self._by_gloo = {d: any(is_by_gloo(g, d) for g in every) for d in ("cpu", "cuda")}
        # On NCCL only the stream waits; a time limit in wait() would block the host at every hop.
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._limits = {c: nccl_limit(g, timeout_seconds) for c, g in channels.items()}
        # Of all ranks, too: Megatron's own messages wait behind ours, and end with that limit.
        limits = [*self._limits.values(), nccl_limit(dist.group.WORLD, timeout_seconds)]
        self._watchdog: Watchdog | None = Watchdog(limits)  # of what NCCL carries
        self.bytes_by_channel: Counter[Channel] = Counter()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self.bytes_by_channel.total()

    def subgroup(self, members: Sequence[int]) -> "Communicator":
        """Return the transport of a part of the group: rank i there is `members[i]` here.

        It shares the process groups, which must reach the members, and the count of the bytes.
        """
        part = copy.copy(self)
        part._ranks = [self._ranks[member] for member in members]
        part._numbers = [self._numbers[member] for member in members]
        return part

    def is_by_gloo(self, device: torch.device) -> bool:
        """Whether the host waits for messages of tensors there."""
        return self._by_gloo.get(device.type, False)

    @contextmanager
    def in_pass(self, name: str) -> Iterator[None]:
        """Within it the messages of a pass go; an error in it ends all that this transport can do.

        For the other ranks are at a message of that pass, and would take the next call's for it.
        They are told: gloo's connections are closed; on NCCL they hear of it in their next call.

        Raises:
            CommunicationError: an earlier pass failed.
        """
        if self.agreement is not None:
            self.agreement.look()
        try:
            yield
        except BaseException as error:
            if self.agreement is None:
                raise
            self.agreement.tell(f"{name}: {type(error).__name__}: {error}")
            self.hang_up()
            if not isinstance(error, CommunicationError):
                raise
            raise CommunicationError(f"{error}{self.agreement.hear()}") from error

    def message(self, transfer: Send | Receive, tensor: Tensor) -> "Message":
        """Return the message of one tensor of what `transfer` moves."""
        verb, side = ("send", "to") if isinstance(transfer, Send) else ("receive", "from")
        peer, owner = self._ranks[transfer.peer], self._numbers[transfer.item.owner]
        name = f"{verb} {transfer.item.kind} of CP rank {owner} {side} rank {peer}"
        by_host = tensor.is_cuda and self._by_gloo["cuda"]
        return Message(transfer, name, tensor, pinned_like(tensor) if by_host else tensor)

    def start(self, messages: Sequence["Message"], where: str) -> list[_Work]:
        """Post the messages of one channel, receives first; return what is to be waited for.

        NCCL may hang with more than 256 operations in a group; no plan has more in a batch.
        """
        operations = []
        for message in messages:
            transfer, _, tensor, wire = message
            sends = isinstance(transfer, Send)
            if sends and wire is not tensor:
                wire.copy_(tensor)  # waits for the device, which gloo would not
            peer, group = self._ranks[transfer.peer], self._channels[transfer.channel]
            operations.append(dist.P2POp(dist.isend if sends else dist.irecv, wire, peer, group))
            self.bytes_by_channel[transfer.channel] += message.bytes_sent
        together = _names(messages)
        with named_errors(where, together):
            works = dist.batch_isend_irecv(operations)
        names = [message.name for message in messages]
        if len(works) != len(names):  # NCCL gives one handle for all
            names = [together] * len(works)
        by_gloo = self.is_by_gloo(tensor.device)
        if self._watchdog and not by_gloo:
            where, limit = f"rank {dist.get_rank()}, {where}", self._limits[transfer.channel]
            for name, work in zip(names, works, strict=True):
                self._watchdog.watch(f"{where}: {name}", work.is_completed, limit)
        seconds = self._timeout if by_gloo else None
        return [(name, work, seconds) for name, work in zip(names, works, strict=True)]

    def wait(self, works: Sequence[_Work], where: str) -> None:
        """Wait until all are through."""
        for name, work, seconds in works:
            with named_errors(where, name):
                work.wait() if seconds is None else work.wait(seconds)

    def hang_up(self) -> None:
        """Close gloo's connections, by a receive that nobody serves; else the others would wait."""
        for group in self._channels.values():
            if is_by_gloo(group, "cpu"):
                peer = (group.rank() + 1) % group.size()
                with suppress(RuntimeError):  # that it took too long, or that they are closed
                    group.recv([torch.empty(1)], peer, _NEVER).wait(_AT_ONCE)


class Message(NamedTuple):
    """One tensor on its way.

    `wire` is the memory that the transport uses: the tensor itself, or, because gloo reaches only
    the host's, a pinned double of a CUDA tensor.
    """

    transfer: Send | Receive
    name: str
    tensor: Tensor
    wire: Tensor

    @property
    def bytes_sent(self) -> int:
        """Its payload where it leaves."""
        return self.wire.nbytes if isinstance(self.transfer, Send) else 0


@dataclass(slots=True)
class _Batch:
    """Messages that are posted together; what a profiler shows of them is read by `tools.trace`."""

    lands: int
    where: str
    messages: list[Message]
    works: Sequence[_Work] = ()

    def __str__(self) -> str:
        sent = sum(message.bytes_sent for message in self.messages)
        return f"for step {self.lands}, {sent} bytes: {_names(self.messages)}"


def _names(messages: Sequence[Message]) -> str:
    return "; ".join(dict.fromkeys(message.name for message in messages))


class Transfers:
    """The transfers of one forward or backward: its buffers, and what is on its way.

    A buffer is one flat piece a tensor, as large as the largest item that the plan puts there.
    """

    def __init__(
        self,
        communicator: Communicator,
        name: str,  # for errors and profiles
        plan: Plan,
        template: Callable[[Item], Block],  # tensors of the shape and dtype in which it arrives
    ) -> None:
        self._communicator, self._name, self._template = communicator, name, template
        self._largest = plan.largest_arrivals
        self._buffers: dict[tuple[Kind, int], Block] = {}
        self._pending: dict[int, list[_Batch]] = defaultdict(list)  # by the step that waits

    def post(self, number: int, step: Step, outgoing: Mapping[Item, Block]) -> None:
        """Start the transfers of step `number` and return at once.

        `outgoing` has the contiguous tensors of every item that leaves; they must not be written to
        before they have landed.
        """
        batches: dict[tuple[int, int], _Batch] = {}
        moved: list[tuple[Send | Receive, Block]] = [(r, self._buffer(r)) for r in step.receives]
        moved += ((s, outgoing[s.item]) for s in step.sends)
        for transfer, block in moved:
            # All ranks post in this order: NCCL wants one over all communicators of a device.
            key = _CHANNELS.index(transfer.channel), transfer.lands
            if key not in batches:
                batches[key] = _Batch(transfer.lands, f"{self._name} step {number}", [])
            batches[key].messages += (self._communicator.message(transfer, t) for t in block)
        for _, batch in sorted(batches.items()):
            with span(self._name, number, "post", batch):
                batch.works = self._communicator.start(batch.messages, batch.where)
            self._pending[batch.lands].append(batch)

    @property
    def are_under_way(self) -> bool:
        """Whether something was posted that has not landed."""
        return bool(self._pending)

    def land(self, number: int) -> list[tuple[Item, Block]]:
        """Wait for all that lands in step `number`; return what arrived, in the order posted.

        A block stays in its buffer for as long as the plan needs it.

        Raises:
            CommunicationError: a peer died, or a message took longer than the time limit.
        """
        if number not in self._pending:
            return []
        receives: dict[Receive, None] = {}
        with span(self._name, number, "wait"):
            for batch in self._pending.pop(number):
                self._communicator.wait(batch.works, batch.where)
                for transfer, _, tensor, wire in batch.messages:
                    if isinstance(transfer, Receive):
                        receives[transfer] = None
                        if wire is not tensor:
                            tensor.copy_(wire)
        return [(r.item, self._buffer(r)) for r in receives]

    def _buffer(self, receive: Receive) -> Block:
        """View the buffer of what arrives in the shapes that it has; messages are contiguous."""
        key = receive.item.kind, receive.buffer
        if key not in self._buffers:
            largest = self._template(self._largest[key])
            self._buffers[key] = tuple(t.new_empty(t.numel()) for t in largest)
        shaped = zip(self._buffers[key], self._template(receive.item), strict=True)
        return tuple(flat[: t.numel()].view(t.shape) for flat, t in shaped)
