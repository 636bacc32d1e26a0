"""The memory in which the messages of a pass lie, for as long as the pass goes on.

NCCL's group in torch records the tensors of a message on its stream (`Tensor.record_stream`), so
that what was freed is not to be had until the device gets there: memory that was made for each
message would pile up by as much as the host is ahead. So a pass has one piece of memory, and NCCL
gets aliases of it, which torch's allocator does not own and so does not record. At the end of the
pass its stream has waited for all messages, so that the piece is freed in the order of the stream,
as any other. If a context kept it, it would live beside the rest of the layer and the loss, too.

The allocator of `backend:cudaMallocAsync` knows aliases by their address: with it a piece a pass
waits for the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_burst.transport.lowered import Block, Lowered, LoweredStep, Place, forms_of


@dataclass(slots=True, eq=False)
class _Room:
    """What is kept of a pass: views, of a storage that has memory only while the pass goes on."""

    piece: Tensor  # uint8
    steps: list[LoweredStep]
    sent: Tensor  # of which messages are parts

    def refill(self) -> None:
        """Take memory; it mostly lies where it lay before."""
        self.piece.untyped_storage().resize_(self.piece.nbytes)
        if self.sent is not self.piece and self.sent.data_ptr() != self.piece.data_ptr():
            self.sent = _alias(self.piece)


class MessageMemory:
    """Lends each pass of a context memory; one pass at a time."""

    def __init__(self) -> None:
        self._rooms = WeakKeyDictionary[Lowered, _Room]()
        self._borrower = ""

    @contextmanager
    def lent(
        self, lowered: Lowered, device: torch.device
    ) -> Iterator[tuple[list[LoweredStep], Tensor]]:
        """Return the steps of a pass and the memory of their messages, its own until the end.

        After an error the memory stays, for messages may still arrive in it. Passes without
        messages, as those of a rank alone, may go on side by side.
        """
        moves = bool(lowered.size or lowered.sent_in_place)
        if self._borrower and moves:
            raise RuntimeError(
                f"a {lowered.name} began while a {self._borrower} of the same context goes on: "
                "calls of one context come one after the other, in one order on all ranks"
            )
        if moves:
            self._borrower = lowered.name
        try:
            with torch.inference_mode(False):  # it is used outside, too
                room = self._room(lowered, device)
            yield room.steps, room.sent
            room.piece.untyped_storage().resize_(0)
        finally:
            if moves:
                self._borrower = ""

    def _room(self, lowered: Lowered, device: torch.device) -> _Room:
        if (room := self._rooms.get(lowered)) is not None:
            room.refill()
            return room
        piece = torch.empty(lowered.size, dtype=torch.uint8, device=device)
        room = _Room(piece, lowered.steps_in(piece), _alias(piece))
        self._rooms[lowered] = room
        return room


def side_by_side(block: Block) -> Block:
    """Return the tensors one behind the other in one piece of memory, as they travel.

    What lies so already is returned as it is.
    """
    if _bytes_of(block) is not None:
        return block
    place = Place(forms_of(block))
    piece = torch.empty(place.end, dtype=torch.uint8, device=block[0].device)
    packed = place.tensors_in(piece)
    write(packed, block)
    return packed


def write(into: Block, block: Block) -> None:
    """Copy tensors to where they are sent from."""
    torch._foreach_copy_(list(into), list(block))


def message_of(block: Block) -> Tensor:
    """Return the bytes of the tensors as one message; without a copy where they are `side_by_side`.

    On a GPU that is an alias which torch's allocator does not own, so that NCCL's group records
    nothing. That is safe: the stream on which it is freed has waited for the message before.
    """
    data = _bytes_of(side_by_side(block))
    assert data is not None
    return _alias(data)


def _alias(data: Tensor) -> Tensor:
    """Return an alias of bytes on a GPU, of their storage from its begin; others as they are."""
    if type(data) is not Tensor or not data.is_cuda:
        return data
    begin = int(data.storage_offset())
    whole = data.as_strided((begin + data.nbytes,), (1,), 0)
    return torch.from_dlpack(whole)[begin:]


def _bytes_of(block: Sequence[Tensor]) -> Tensor | None:
    """View the bytes of tensors that lie one behind the other; None if they do not."""
    first = block[0]
    if not all(t.is_contiguous() for t in block):
        return None
    storage = first.untyped_storage()
    begin = int(first.storage_offset()) * first.element_size()
    place = Place(forms_of(tuple(block)), begin)
    begins = [t.storage_offset() * t.element_size() for t in block]
    if begins != place.begins or any(t.untyped_storage()._cdata != storage._cdata for t in block):
        return None
    flat = first.detach().view(-1).view(torch.uint8)
    return flat.as_strided((place.end - begin,), (1,), begin)
