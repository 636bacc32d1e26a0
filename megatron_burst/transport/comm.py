"""Carries out the transfers of a plan and names what failed when one does.

All messages that a step posts on a channel go out at once, receives first: gloo needs a buffer for
what arrives, and NCCL takes them as one group. Both ends post in the order of the plan.

On NCCL a message runs on the stream of its channel's communicator: posting it waits for the work
queued so far, waiting for it makes the current stream wait, and the host goes on in both cases.
"""

import copy
import datetime
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Plan, Send, Transfer
from megatron_burst.transport.agreement import Agreement
from megatron_burst.transport.backend import backend_of, is_by_gloo, nccl_limit
from megatron_burst.transport.errors import CommunicationError
from megatron_burst.transport.lowered import Batch, Block, Form, Lowered, LoweredStep
from megatron_burst.transport.memory import MessageMemory, message_of
from megatron_burst.transport.pinned import pinned_like
from megatron_burst.transport.profiling import span
from megatron_burst.transport.watchdog import Watchdog

_NEVER = 2  # a tag that no message has
_AT_ONCE = datetime.timedelta(milliseconds=1)
_A_WHILE = datetime.timedelta(seconds=1)

type _Call = tuple[Callable[..., dist.Work], list[Tensor], int]  # send or receive, what, which peer


class _Ready(NamedTuple):
    """A batch as torch takes it, in a pass that has this memory."""

    memory: Tensor
    group: dist.ProcessGroup
    calls: Sequence[_Call]
    arriving: Sequence[tuple[Tensor, Tensor]]  # where it is to be, and the wire, if that is another
    by_gloo: bool


class Posted(NamedTuple):
    """A batch on its way."""

    batch: Batch
    works: Sequence[dist.Work]
    arriving: Sequence[tuple[Tensor, Tensor]]
    seconds: datetime.timedelta | None  # the host waits so long; None: not at all


class _Title(NamedTuple):
    rank: int
    batch: Batch

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.batch.where}: {self.batch.names}"


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
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        every = channels.values()
        self._by_gloo = {d: any(is_by_gloo(g, d) for g in every) for d in ("cpu", "cuda")}
        # On NCCL only the stream waits; a time limit in wait() would block the host at every hop.
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._limits = {c: nccl_limit(g, timeout_seconds) for c, g in channels.items()}
        # Of all ranks, too: Megatron's own messages wait behind ours, and end with that limit.
        limits = [*self._limits.values(), nccl_limit(dist.group.WORLD, timeout_seconds)]
        self._watchdog: Watchdog | None = Watchdog(limits)  # of what NCCL carries
        self.bytes_by_channel: Counter[Channel] = Counter()
        self.memory = MessageMemory()

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent so far."""
        return self.bytes_by_channel.total()

    def subgroup(self, members: Sequence[int]) -> "Communicator":
        """Return the transport of a part of the group: rank i there is `members[i]` here.

        It shares the process groups, which must reach the members, the memory of messages and the
        count of the bytes.
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

    def lower(self, name: str, plan: Plan, forms: Callable[[Item], Iterable[Form]]) -> Lowered:
        """Make a plan ready for tensors that travel in these forms."""
        return Lowered(name, plan, forms, self.name_of)

    @contextmanager
    def transfers(
        self, lowered: Lowered, own: Mapping[Kind, Block], device: torch.device
    ) -> Iterator["Transfers"]:
        """Lend a pass, which has these own blocks, the memory for its messages."""
        in_place = {kind: message_of(own[kind]) for kind in lowered.sent_in_place}
        with self.memory.lent(lowered, device) as (steps, memory):
            transfers = Transfers(self, lowered.name, steps, in_place, memory)
            try:
                yield transfers
            except BaseException:
                transfers.let_through()
                raise

    def name_of(self, transfer: Transfer) -> str:
        """Return what a message does, in words."""
        verb, side = ("send", "to") if isinstance(transfer, Send) else ("receive", "from")
        peer, owner = self._ranks[transfer.peer], self._numbers[transfer.item.owner]
        return f"{verb} {transfer.item.kind} of CP rank {owner} {side} rank {peer}"

    def wire(self, tensor: Tensor) -> Tensor:
        """Return the memory that the transport uses for a message: gloo reaches only the host's."""
        return pinned_like(tensor) if tensor.is_cuda and self._by_gloo["cuda"] else tensor

    def start(self, batch: Batch, own: Mapping[Kind, Tensor], memory: Tensor) -> Posted:
        """Post messages, receives first; `own` are the bytes of what is sent from where it is.

        NCCL may hang with more than 256 operations in a group; no plan has more in a batch.
        """
        ready = batch.ready
        if ready is None or ready.memory is not memory:
            ready = self._ready(batch, own, memory)
        self.bytes_by_channel[batch.channel] += batch.bytes_sent
        try:
            works = post_together(ready.group, ready.calls)
        except RuntimeError as error:
            raise self._failed(batch, batch.names, error) from error
        if ready.by_gloo:
            return Posted(batch, works, ready.arriving, self._timeout)
        if self._watchdog:
            title, limit = _Title(self._rank, batch), self._limits[batch.channel]
            for work in works:
                self._watchdog.watch(title, work.is_completed, limit)
        return Posted(batch, works, ready.arriving, None)

    def wait(self, posted: Posted) -> None:
        """Wait until all are through."""
        batch, works, arriving, seconds = posted
        for number, work in enumerate(works):
            try:
                work.wait() if seconds is None else work.wait(seconds)
            except RuntimeError as error:
                said = batch.names
                if len(works) == len(batch.messages):  # NCCL gives one handle for all
                    said = self.name_of(batch.messages[number].transfer)
                raise self._failed(batch, said, error) from error
        for tensor, wire in arriving:
            tensor.copy_(wire)

    def _ready(self, batch: Batch, own: Mapping[Kind, Tensor], memory: Tensor) -> _Ready:
        group, arriving = self._channels[batch.channel], []
        calls: list[_Call] = []
        for message in batch.messages:
            wire = self.wire(tensor := message.bytes(own, memory))
            peer = dist.get_group_rank(group, self._ranks[message.transfer.peer])
            sends = isinstance(message.transfer, Send)
            if wire is not tensor and sends:
                wire.copy_(tensor)  # waits for the device, which gloo would not
            elif wire is not tensor:
                arriving.append((tensor, wire))
            calls.append((group.send if sends else group.recv, [wire], peer))
        ready = _Ready(memory, group, calls, arriving, self.is_by_gloo(tensor.device))
        if wire is tensor and all(message.place for message in batch.messages):
            batch.ready = ready
        return ready

    def _failed(self, batch: Batch, what: str, error: Exception) -> CommunicationError:
        text = f"rank {self._rank}, {batch.where}: could not {what}: {error}"
        return CommunicationError(text)

    def hang_up(self) -> None:
        """Close gloo's connections, by a receive that nobody serves; else the others would wait."""
        for group in self._channels.values():
            if is_by_gloo(group, "cpu"):
                peer = (group.rank() + 1) % group.size()
                with suppress(RuntimeError):  # that it took too long, or that they are closed
                    group.recv([torch.empty(1, device="cpu")], peer, _NEVER).wait(_AT_ONCE)


def post_together(group: dist.ProcessGroup, calls: Sequence[_Call]) -> list[dist.Work]:
    """Send and receive, on NCCL in one of its groups, as `dist.batch_isend_irecv` does."""
    device = calls[0][1][0].device
    if not backend_of(group, device).supports_coalescing:
        return [call(tensors, peer, 0) for call, tensors, peer in calls]
    group._start_coalescing(device)
    for call, tensors, peer in calls:
        call(tensors, peer, 0)
    return [group._end_coalescing(device)]


class Transfers:
    """The transfers of one forward or backward: what is on its way."""

    def __init__(
        self,
        communicator: Communicator,
        name: str,  # for profiles
        steps: Sequence[LoweredStep],
        own: Mapping[Kind, Tensor],  # the bytes of what is sent from where it is
        memory: Tensor,  # of all other messages
    ) -> None:
        self._communicator, self._name, self._steps = communicator, name, steps
        self._own, self._memory = own, memory
        self._pending: dict[int, list[Posted]] = defaultdict(list)  # by the step that waits

    def writes(self, number: int) -> Sequence[tuple[Item, Block]]:
        """Return what is to be written where before step `number` is posted."""
        return self._steps[number].writes

    def post(self, number: int) -> None:
        """Start the transfers of step `number` and return at once.

        What is sent must not be written to before it has landed.
        """
        for batch in self._steps[number].batches:
            with span(self._name, number, "post", batch):
                posted = self._communicator.start(batch, self._own, self._memory)
            self._pending[batch.lands].append(posted)

    @property
    def are_under_way(self) -> bool:
        """Whether something was posted that has not landed."""
        return bool(self._pending)

    def land(self, number: int) -> Sequence[tuple[Item, Block]]:
        """Wait for all that lands in step `number`; return what arrived, in the order posted.

        A block stays in its buffer for as long as the plan needs it.
        """
        if number in self._pending:
            with span(self._name, number, "wait"):
                for posted in self._pending.pop(number):
                    self._communicator.wait(posted)
        return self._steps[number].arrivals

    def let_through(self) -> None:
        """Wait a while for what gloo has under way, before connections are closed.

        A message that is cut off in the middle would leave the other end waiting for its time
        limit: gloo fails those that have not begun, and forgets that one.
        """
        for posted in itertools.chain.from_iterable(self._pending.values()):
            if posted.seconds is not None:
                with suppress(RuntimeError):  # the other end has failed, too
                    for work in posted.works:
                        work.wait(_A_WHILE)
