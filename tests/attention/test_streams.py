"""What is saved in the host's memory is copied on one stream, in an order that holds. (fast tier)

Without a device: tests/streams.py stands in for CUDA's streams.
"""

import pytest
import torch
from torch import Tensor

from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.transport.host import HostMemory
from tests.streams import Streams

ROW = 2


def results() -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of attention, as a kernel writes them."""
    return torch.zeros(1, 8, 2, 4, device="cuda"), torch.zeros(1, 2, 8, device="cuda")


def first_pass(memory: AttentionMemory) -> None:
    memory.save(ROW, *results())  # and the results are freed
    results()  # which may get their memory


def second_pass(memory: AttentionMemory) -> None:
    out, lse = results()
    saved = memory.recall()
    assert saved is not None
    saved.put(out, lse)
    del saved  # and with it what was fetched
    (out + 1, lse + 1)  # what follows reads them
    results()


def train(layers: int, ahead: int) -> Streams:
    """Forward and backward of layers, each fetched when the one `ahead` of it begins."""
    streams, host = Streams(), HostMemory()
    with streams.recording():
        memories = [AttentionMemory(0.5, host) for _ in range(layers)]
        for memory in memories:
            first_pass(memory)
        waiting = memories[::-1]
        for number, memory in enumerate(waiting):
            for wanted in waiting[number : number + ahead]:
                wanted.fetch()
            second_pass(memory)
    return streams


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_copies_of_saved_results_are_ordered(ahead: int) -> None:
    streams = train(3, ahead)
    assert len(streams.made) == 1, "one stream a device"
    # Outputs and log-sum-exp, there and back; the last layer's are still on the card.
    assert streams.copies == 6 * ["to the host"] + 4 * ["to the device"]
