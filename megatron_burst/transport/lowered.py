"""A plan made ready for its messages, once: what is posted, waited for and written, as tensors.

An item is one message: its tensors lie one behind the other in the memory of messages, or, of a
rank's own blocks, in a piece of memory of their own.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Plan, Receive, Send, Transfer
from megatron_burst.transport.arrangement import Stay, arrange

_CHANNELS = list(Channel)
_TENSOR = 16  # bytes, of which the place of a tensor is a multiple

type Block = tuple[Tensor, ...]  # the tensors of an item


class Form(NamedTuple):
    """What a contiguous tensor looks like."""

    shape: Sequence[int]
    dtype: torch.dtype


def forms_of(block: Block) -> list[Form]:
    """Return what these tensors look like."""
    return [Form(t.shape, t.dtype) for t in block]


class Place:
    """Where in a piece of memory the tensors of an item lie, one behind the other."""

    def __init__(self, forms: Iterable[Form], begin: int = 0) -> None:
        self._tensors: list[tuple[int, int, Form]] = []
        self.begin = self.end = begin
        self.payload = 0  # bytes
        for form in forms:
            start, size = _up(self.end, _TENSOR), math.prod(form.shape) * form.dtype.itemsize
            self._tensors.append((start, size, form))
            self.end = start + size
            self.payload += size

    @property
    def begins(self) -> list[int]:
        """Where each tensor begins, in bytes."""
        return [start for start, *_ in self._tensors]

    def tensors_in(self, memory: Tensor) -> Block:
        """View the tensors."""
        return tuple(
            memory[start : start + size].view(form.dtype).view(form.shape)
            for start, size, form in self._tensors
        )


class Message(NamedTuple):
    """An item on its way; its place is None if it is a rank's own block, which every call has."""

    transfer: Transfer
    place: Place | None

    def bytes(self, own: Mapping[Kind, Tensor], memory: Tensor) -> Tensor:
        """Return its bytes in a pass that has these own blocks and this memory."""
        if self.place is None:
            return own[self.transfer.item.kind]
        return memory[self.place.begin : self.place.end]


@dataclass(slots=True, eq=False)
class Batch:
    """Messages that are posted together; what a profiler shows of them is read by `tools.trace`."""

    where: str  # the pass and the step
    channel: Channel
    lands: int
    messages: Sequence[Message]  # receives first
    bytes_sent: int  # payload
    name_of: Callable[[Transfer], str]
    ready: Any = None  # what the transport keeps of it

    @property
    def names(self) -> str:
        """What is done, in words."""
        return "; ".join(self.name_of(message.transfer) for message in self.messages)

    def __str__(self) -> str:
        return f"for step {self.lands}, {self.bytes_sent} bytes: {self.names}"


@dataclass(slots=True, eq=False)
class LoweredStep:
    """What a step does beside its tiles."""

    writes: Sequence[tuple[Item, Block]]  # what is written where, before it is sent
    batches: Sequence[Batch]
    arrivals: Sequence[tuple[Item, Block]]  # what has landed at its end, in the order posted


class Lowered:
    """One rank's forward or backward for tensors of given shapes.

    What arrives, and what is written to be sent, has its place in memory for the steps that need
    it. The rank's keys and values, and blocks of one tensor, are sent whole from where they are.
    """

    def __init__(
        self,
        name: str,  # for errors and profiles
        plan: Plan,
        forms: Callable[[Item], Iterable[Form]],  # in which an item travels
        name_of: Callable[[Transfer], str],
    ) -> None:
        self.name, self._plan, self._name_of = name, plan, name_of
        items = dict.fromkeys(transfer.item for transfer in plan.transfers)
        self._forms = {item: list(forms(item)) for item in items}
        self._stays: list[Stay] = []
        self._stay_of: dict[tuple[int, Transfer], int] = {}  # by the step that posts it
        self._writes: dict[int, list[Send]] = defaultdict(list)  # what is written first, by step
        self._find_stays()
        self._begins, self.size = arrange(self._stays)
        self.sent_in_place = {send.item.kind for send in plan.sends if self._is_in_place(send)}
        """The kinds of the rank's own blocks that are sent from where they are."""

    @property
    def arrivals(self) -> Iterator[tuple[Kind, Stay]]:
        """The kind of what arrives, and for how long its memory is needed."""
        for (_, transfer), number in self._stay_of.items():
            if isinstance(transfer, Receive):
                yield transfer.item.kind, self._stays[number]

    def _find_stays(self) -> None:
        there: dict[Item, int] = {}  # the stays of blocks that have landed, or were written
        landing: dict[int, dict[Item, int]] = defaultdict(dict)
        for number, step in enumerate(self._plan.steps):
            for receive in step.receives:
                stay = self._stay_of[number, receive] = self._stay(number, receive)
                if receive.item.kind is Kind.HEADS:  # all are put together at the end
                    self._extend(stay, len(self._plan.steps) - 1)
                if not receive.item.kind.is_result:
                    landing[receive.lands][receive.item] = stay
            for send in step.sends:
                if self._is_in_place(send):
                    continue
                if send.item.kind.is_result or send.item not in there:
                    there[send.item] = self._stay(number, send)
                    self._writes[number].append(send)
                self._stay_of[number, send] = there[send.item]
                self._extend(there[send.item], send.lands)
            for item in {item for tiles in step.blocks for item in tiles.blocks}:
                if item.owner != self._plan.rank:  # its own are read where they are
                    self._extend(there[item], number)
            there |= landing[number]

    def _stay(self, number: int, transfer: Transfer) -> int:
        size = Place(self._forms[transfer.item]).end
        self._stays.append(Stay(number, transfer.lands, size))
        return len(self._stays) - 1

    def _extend(self, stay: int, end: int) -> None:
        begin, before, size = self._stays[stay]
        self._stays[stay] = Stay(begin, max(before, end), size)

    def steps_in(self, memory: Tensor) -> list[LoweredStep]:
        """Return the steps, with all places in this memory: uint8, at least `size`."""
        arrivals: dict[int, list[tuple[Item, Block]]] = defaultdict(list)
        steps = []
        for number, step in enumerate(self._plan.steps):
            batches = defaultdict[tuple[int, int], list[Transfer]](list)
            moved: list[Transfer] = [*step.receives, *step.sends]
            for transfer in moved:
                # All ranks post in this order: NCCL wants one over all communicators of a device.
                batches[_CHANNELS.index(transfer.channel), transfer.lands].append(transfer)
            posted = [batch for _, batch in sorted(batches.items(), key=lambda each: each[0])]
            for receive in (t for batch in posted for t in batch if isinstance(t, Receive)):
                block = self._place(number, receive).tensors_in(memory)
                arrivals[receive.lands].append((receive.item, block))
            writes = [
                (send.item, self._place(number, send).tensors_in(memory))
                for send in self._writes[number]
            ]
            lowered = [self._batch(number, batch) for batch in posted]
            steps.append(LoweredStep(writes, lowered, arrivals[number]))
        return steps

    def _batch(self, number: int, transfers: Sequence[Transfer]) -> Batch:
        messages, sent = [], 0
        for transfer in transfers:
            is_in_place = isinstance(transfer, Send) and self._is_in_place(transfer)
            place = None if is_in_place else self._place(number, transfer)
            messages.append(Message(transfer, place))
            sent += isinstance(transfer, Send) and Place(self._forms[transfer.item]).payload
        where = f"{self.name} step {number}"
        return Batch(where, transfers[0].channel, transfers[0].lands, messages, sent, self._name_of)

    def _is_in_place(self, send: Send) -> bool:
        kind, owner, part, target = send.item
        is_whole_block = not (kind.is_result or part) and target is None
        is_one_piece = kind is Kind.KV or len(self._forms[send.item]) == 1
        return owner == self._plan.rank and is_whole_block and is_one_piece

    def _place(self, number: int, transfer: Transfer) -> Place:
        return Place(self._forms[transfer.item], self._begins[self._stay_of[number, transfer]])


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
