"""Carries out the transfers of a plan and names what failed when one does.

All messages that a step posts on a channel go out at once, receives first: gloo needs a buffer for
what arrives, and NCCL takes them as one group. Both ends post in the order of the plan.

On NCCL a message runs on the stream of its channel's communicator: posting it waits for the work
queued so far, waiting for it makes the current stream wait, and the host goes on in both cases.
"""

import copy
import datetime
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.plans.plan import Channel, Item, Kind, Plan, Receive, Send, Step
from megatron_burst.transport.pinned import pinned_like
from megatron_burst.transport.profiling import span
from megatron_burst.transport.watchdog import Limit, Watchdog

_CHANNELS = list(Channel)

type Block = tuple[Tensor, ...]  # the tensors of an item
type _Work = tuple[str, dist.Work]  # with what it does


class CommunicationError(RuntimeError):
    """A hop of a ring failed or took too long; the message names step, peer and tensor."""


class Communicator:
    """The transport of one context-parallel group; counts the payload bytes that it sends."""

    def __init__(
        self,
        ranks: Sequence[int],  # the job's number of each rank of the group
        channels: Mapping[Channel, dist.ProcessGroup],  # empty for a process that has no peer
        timeout_seconds: float,  # how long a message may take
    ) -> None:
        self._ranks, self._channels = ranks, channels
        self._numbers: Sequence[int] = range(len(ranks))  # of the ranks in the group
        self._on_gloo = any(dist.get_backend(g) == dist.Backend.GLOO for g in channels.values())
        # On NCCL only the stream waits; a time limit in wait() would block the host at every hop.
        self._timeout = datetime.timedelta(seconds=timeout_seconds) if self._on_gloo else None
        self._limits = {c: _nccl_limit(g, timeout_seconds) for c, g in channels.items()}
        # Of all ranks, too: Megatron's own messages wait behind ours, and end with that limit.
        limits = [*self._limits.values(), _nccl_limit(dist.group.WORLD, timeout_seconds)]
        self._watchdog = None if self._on_gloo else Watchdog(limits)
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

    def message(self, transfer: Send | Receive, tensor: Tensor) -> "Message":
        """Return the message of one tensor of what `transfer` moves."""
        verb, side = ("send", "to") if isinstance(transfer, Send) else ("receive", "from")
        peer, owner = self._ranks[transfer.peer], self._numbers[transfer.item.owner]
        name = f"{verb} {transfer.item.kind} of CP rank {owner} {side} rank {peer}"
        by_host = self._on_gloo and tensor.is_cuda
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
        with _named_errors(where, together):
            works = dist.batch_isend_irecv(operations)
        names = [message.name for message in messages]
        if len(works) != len(names):  # NCCL gives one handle for all
            names = [together] * len(works)
        if self._watchdog:
            where, limit = f"rank {dist.get_rank()}, {where}", self._limits[transfer.channel]
            for name, work in zip(names, works, strict=True):
                self._watchdog.watch(f"{where}: {name}", work.is_completed, limit)
        return list(zip(names, works, strict=True))

    def wait(self, works: Sequence[_Work], where: str) -> None:
        """Wait until all are through."""
        limit = () if self._timeout is None else (self._timeout,)
        for name, work in works:
            with _named_errors(where, name):
                work.wait(*limit)


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
        self._largest, self._chunk = plan.largest_arrivals, plan.chunk
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
            block = self._chunks(transfer, block)
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

        A block stays in its buffer for as long as the plan needs it. Of blocks that lie side by
        side all are returned at the first one.

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
        return [(r.item, self._buffer(r)) for r in receives if r.place == 0]

    def _buffer(self, receive: Receive) -> Block:
        """View the buffer of what arrives, and of what lies beside it; messages are contiguous."""
        key = receive.item.kind, receive.buffer
        if key not in self._buffers:
            largest, times = self._largest[key]
            flat = (t.new_empty(times * t.numel()) for t in self._template(largest))
            self._buffers[key] = tuple(flat)
        shaped, times = self._template(receive.item), receive.places
        return tuple(
            flat[: times * t.numel()].view(t.shape[0], times * t.shape[1], *t.shape[2:])
            for flat, t in zip(self._buffers[key], shaped, strict=True)
        )

    def _chunks(self, transfer: Send | Receive, block: Block) -> Block:
        """Return what is a message each: whole tensors, or chunks that will lie beside others'."""
        if not self._chunk or transfer.item.kind is not Kind.KV:
            return block
        place, places = 0, 1
        if isinstance(transfer, Receive):
            place, places = transfer.place, transfer.places
        split = (t.unflatten(1, (-1, places, self._chunk))[0, :, place] for t in block)
        return tuple(chunk for chunks in split for chunk in chunks)


@contextmanager
def _named_errors(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()}, {where}: could not {what}: {error}"
        ) from error


def check_agreement(
    group: dist.ProcessGroup,
    what: str,
    value: str,
    timeout_seconds: float,
    where: str = "at the start",
) -> None:
    """Compare `value` over the ranks of `group`, a collective call; ValueError if they differ."""
    purpose = f"compare {what} with the other ranks"
    values = gather_objects(group, purpose, value, timeout_seconds, where)
    if len(set(values)) > 1:
        listed = "\n".join(
            f"  rank {dist.get_global_rank(group, i)}: {v}" for i, v in enumerate(values)
        )
        raise ValueError(f"the context-parallel ranks disagree on {what}:\n{listed}")


def gather_objects[T](
    group: dist.ProcessGroup,
    purpose: str,
    value: T,
    timeout_seconds: float,
    where: str = "at the start",
) -> list[T]:
    """Return the values of all ranks of `group`, a collective call; errors name its purpose.

    The time limit is gloo's; on NCCL it is the group's own.
    """
    values: list[T] = [value] * group.size()
    with _named_errors(where, purpose):
        if dist.get_backend(group) == dist.Backend.GLOO:
            _wait_for_all(group, timeout_seconds)
        dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object[T](
    group: dist.ProcessGroup, purpose: str, value: T, source: int, where: str
) -> T:
    """Return the value of rank `source` of a gloo group, a collective call, as `gather_objects`."""
    values = [value]
    with _named_errors(where, purpose):
        dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def any_rank(group: dist.ProcessGroup, purpose: str, value: bool, where: str) -> bool:
    """Return whether `value` is true on a rank of a gloo group, likewise."""
    found = torch.tensor(int(value))
    with _named_errors(where, purpose):
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found)


def nccl_options(group: dist.ProcessGroup | None) -> Any:
    """Return the options that a group has; None if it is not NCCL's."""
    if group is None or dist.Backend.NCCL not in dist.get_backend(group):
        return None
    return getattr(group._get_backend(torch.device("cuda")), "options", None)


def _nccl_limit(group: dist.ProcessGroup | None, usual: float) -> Limit:
    """Return what reads the group's own time limit, which Megatron may change, in seconds."""
    options = nccl_options(group)

    def limit() -> float:
        found = getattr(options, "_timeout", None)
        return found.total_seconds() if found else usual

    return limit


def warm_up(channels: Mapping[Channel, dist.ProcessGroup]) -> None:
    """Let all members of every channel meet; all ranks of the job's groups call it together.

    NCCL wants every rank of a group at its first use, and messages are between few of them.
    """
    for channel in sorted(channels, key=_CHANNELS.index):  # one order for overlapping groups
        with _named_errors("at the start", f"meet all ranks of the communicator for {channel}"):
            dist.barrier(channels[channel])


def _wait_for_all(group: dist.ProcessGroup, timeout_seconds: float) -> None:
    """Wait on gloo until all ranks have come; a RuntimeError names those that did not.

    Not by `monitored_barrier`, in which all others wait for the first rank without a limit.
    """
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    sends: list[Any] = [dist.isend(torch.zeros(1), rank, group) for rank in others]
    receives: list[Any] = [dist.irecv(torch.empty(1), rank, group) for rank in others]
    end, missing = time.monotonic() + timeout_seconds, []
    for rank, work in zip(others, receives, strict=True):
        left = max(end - time.monotonic(), 0.001)  # gloo takes 0 for no limit
        try:
            work.wait(datetime.timedelta(seconds=left))
        except RuntimeError:  # after the first one gloo ends all that has not arrived
            missing.append(str(rank))
    if missing:
        raise RuntimeError(f"rank {', '.join(missing)} did not come within {timeout_seconds:g} s")
    for send in sends:
        send.wait()
