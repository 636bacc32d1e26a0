"""Carries out the transfers of one step and names what failed when one does.

All messages of a step are posted at once, receives first: gloo needs a buffer for what arrives, and
NCCL takes a whole step as one group. Both ends of a link post in the order of the plan.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.plan import Item, Kind, Step, Transfer

type Block = tuple[Tensor, ...]
type _Operation = Callable[..., dist.Work | None]  # dist.isend or dist.irecv


class CommunicationError(RuntimeError):
    """A hop of a ring failed or took too long; the message names step, peer and tensor."""


class Communicator:
    """The transport of one context-parallel group; counts the payload bytes that it sends."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_seconds: float) -> None:
        """Use this group; None for a process that has no peer and so nothing to send."""
        self._group = group
        # On NCCL only the stream waits; a time limit in wait() would block the host at every hop.
        on_gloo = group is not None and dist.get_backend(group) == dist.Backend.GLOO
        self._timeout = datetime.timedelta(seconds=timeout_seconds) if on_gloo else None
        self.bytes_sent = 0

    def post(
        self, step: Step, where: str, outgoing: Mapping[Item, Block], like: Mapping[Kind, Block]
    ) -> "PendingTransfers":
        """Start the transfers of `step` and return at once.

        Args:
            step: the step of the plan; its sends must be keys of `outgoing`.
            where: the step in words, for error messages.
            outgoing: the contiguous tensors of every item that leaves. They must not be written to
                before the returned handle has been waited for.
            like: for each kind that arrives, tensors of the shape and dtype to receive.
        """
        if self._group is None:
            assert not step.receives and not step.sends
            return PendingTransfers([], {}, where, None)
        arriving = {
            transfer.item: tuple(torch.empty_like(t) for t in like[transfer.item.kind])
            for transfer in step.receives
        }
        messages = [
            *_messages(dist.irecv, step.receives, arriving, self._group),
            *_messages(dist.isend, step.sends, outgoing, self._group),
        ]
        self.bytes_sent += sum(m.tensor.nbytes for m in messages if m.operation is dist.isend)
        return PendingTransfers(_start(messages, where), arriving, where, self._timeout)


@dataclass(frozen=True, slots=True)
class _Message:
    """One tensor on its way; `peer` is a rank of the job, not of the group."""

    operation: _Operation
    item: Item
    tensor: Tensor
    peer: int
    group: dist.ProcessGroup

    def __str__(self) -> str:
        verb, side = ("receive", "from") if self.operation is dist.irecv else ("send", "to")
        return f"{verb} {self.item} {side} rank {self.peer}"


def _messages(
    operation: _Operation,
    transfers: Sequence[Transfer],
    blocks: Mapping[Item, Block],
    group: dist.ProcessGroup,
) -> list[_Message]:
    messages = []
    for item, peer in transfers:
        global_peer = dist.get_global_rank(group, peer)
        messages += [_Message(operation, item, t, global_peer, group) for t in blocks[item]]
    return messages


def _start(messages: Sequence[_Message], where: str) -> list[tuple[str, dist.Work]]:
    """Post the messages of a step; return what to wait for, each with its name."""
    if not messages:
        return []
    names = [str(message) for message in messages]
    with _named_errors(where, "; ".join(dict.fromkeys(names))):
        works = dist.batch_isend_irecv(
            [dist.P2POp(m.operation, m.tensor, m.peer, m.group) for m in messages]
        )
    if len(works) != len(messages):  # NCCL gives one handle for the whole step
        names = ["; ".join(dict.fromkeys(names))] * len(works)
    return list(zip(names, works, strict=True))


@contextmanager
def _named_errors(where: str, what: str) -> Iterator[None]:
    """Turn an error of torch.distributed into one that says which hop it was."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()}, {where}: could not {what}: {error}"
        ) from error


def check_agreement(
    group: dist.ProcessGroup, what: str, value: str, timeout_seconds: float
) -> None:
    """Compare `value` over the ranks of `group`, a collective call.

    Raises:
        ValueError: on every rank, if the ranks do not all have the same value.
        CommunicationError: a rank does not come within the time limit (gloo; on NCCL within the
            group's own).
    """
    values: list[str] = [""] * group.size()
    with _named_errors("at the start", f"compare {what} with the other ranks"):
        if dist.get_backend(group) == dist.Backend.GLOO:
            limit = datetime.timedelta(seconds=timeout_seconds)
            dist.monitored_barrier(group, limit, wait_all_ranks=True)  # names who is missing
        dist.all_gather_object(values, value, group=group)
    if len(set(values)) > 1:
        listed = "\n".join(
            f"  rank {dist.get_global_rank(group, i)}: {v}" for i, v in enumerate(values)
        )
        raise ValueError(f"the context-parallel ranks disagree on {what}:\n{listed}")


class PendingTransfers:
    """The transfers of one step in flight; to be waited for once."""

    def __init__(
        self,
        works: Sequence[tuple[str, dist.Work]],
        arriving: Mapping[Item, Block],
        where: str,
        timeout: datetime.timedelta | None,
    ) -> None:
        self._works: Sequence[tuple[str, dist.Work]] | None = works
        self._arriving = arriving
        self._where = where
        self._timeout = timeout

    def wait(self) -> Mapping[Item, Block]:
        """Return what arrived, by item.

        Raises:
            CommunicationError: a peer died, or a message took longer than the time limit.
        """
        if self._works is None:
            raise RuntimeError("these transfers have been waited for already")
        for name, work in self._works:
            with _named_errors(self._where, name):
                if self._timeout is None:
                    work.wait()
                else:
                    work.wait(self._timeout)
        arrived, self._works, self._arriving = self._arriving, None, {}
        return arrived
