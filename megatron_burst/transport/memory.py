"""The memory in which the messages of a context lie, pass after pass.

NCCL's group in torch records the tensors of a message on its stream (`Tensor.record_stream`), so
that what was freed is not to be had until the device gets there: memory that was made for each
message would pile up by as much as the host is ahead. So a context keeps one piece, as large as its
largest pass needs, in which the passes of all layers have their buffers.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from megatron_burst.transport.lowered import Block, Lowered, LoweredStep, Place, forms_of

logger = logging.getLogger(__name__)

_GROWTH = 8  # by at least one part in so many: documents ask for a little more now and then


class MessageMemory:
    """One piece of memory a device, lent to one pass at a time.

    A buffer is posted into again by the stream that read it, after it did: so a pass on another
    stream than the last one's waits for that.
    """

    def __init__(self) -> None:
        self._pieces: dict[torch.device, Tensor] = {}
        self._steps = WeakKeyDictionary[Lowered, list[LoweredStep]]()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._borrower = ""

    @contextmanager
    def lent(
        self, lowered: Lowered, device: torch.device, says: bool
    ) -> Iterator[list[LoweredStep]]:
        """Return the steps of a pass, whose buffers are its own until the end.

        Args:
            lowered: the pass.
            device: of its tensors.
            says: whether to log it where more memory is taken.

        Raises:
            RuntimeError: another pass goes on.
        """
        if not lowered.size:  # no message
            yield lowered.steps_in(torch.empty(0))
            return
        if self._borrower:
            raise RuntimeError(
                f"a {lowered.name} began while a {self._borrower} of the same context goes on: "
                "calls of one context come one after the other, in one order on all ranks"
            )
        self._borrower = lowered.name
        try:
            self._follow(device)
            yield self._lower(lowered, device, says)
        finally:
            self._borrower = ""

    def give_back(self) -> int:
        """Free it, and return how many bytes it had; the next pass takes new memory.

        Raises:
            RuntimeError: a pass goes on.
        """
        if self._borrower:
            raise RuntimeError(f"a {self._borrower} goes on in the memory that is to be freed")
        freed = sum(piece.nbytes for piece in self._pieces.values())
        self._steps.clear()
        self._pieces.clear()
        return freed

    def _lower(self, lowered: Lowered, device: torch.device, says: bool) -> list[LoweredStep]:
        piece = self._pieces.get(device)
        if piece is None or piece.nbytes < lowered.size:
            before = 0 if piece is None else piece.nbytes
            del piece
            self._steps.clear()  # they are views of it
            self._pieces.clear()
            size = max(lowered.size, before + before // _GROWTH)
            with torch.inference_mode(False):  # it is used outside, too
                self._pieces[device] = torch.empty(size, dtype=torch.uint8, device=device)
            if says:
                logger.info(
                    "burst attention: keeps %.1f MiB on %s for the messages of all layers",
                    *(size / 2**20, device),
                )
        if lowered not in self._steps:
            with torch.inference_mode(False):
                self._steps[lowered] = lowered.steps_in(self._pieces[device])
        return self._steps[lowered]

    def _follow(self, device: torch.device) -> None:
        """Let the current stream wait for that of the last pass."""
        if device.type != "cuda" or not torch.cuda.is_initialized():
            return
        stream = torch.cuda.current_stream(device)
        last = self._streams.get(device)
        if last is not None and last != stream:
            stream.wait_stream(last)
        self._streams[device] = stream


def joined(block: Block) -> Block:
    """Return the tensors one behind the other in one piece of memory, as they travel.

    What lies so already is returned as it is.
    """
    if _bytes_of(block) is not None:
        return block
    place = Place(forms_of(block))
    piece = torch.empty(place.end, dtype=torch.uint8, device=block[0].device)
    found = place.tensors_in(piece)
    write(found, block)
    return found


def write(into: Block, block: Block) -> None:
    """Copy tensors to where they are sent from."""
    torch._foreach_copy_(list(into), list(block))


def message_of(block: Block) -> Tensor:
    """Return the bytes of the tensors as one message; without a copy where they are `joined`.

    On a GPU that is an alias which torch's allocator does not own, so that NCCL's group records
    nothing. That is safe: the stream on which it is freed has waited for the message before.
    """
    found = _bytes_of(joined(block))
    assert found is not None
    return torch.from_dlpack(found) if type(found) is Tensor and found.is_cuda else found


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
