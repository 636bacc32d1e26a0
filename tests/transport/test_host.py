"""What waits in the host's memory goes and comes in an order that holds. (fast tier)

Without a device: tests/streams.py stands in for CUDA's streams.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_burst.transport.host import (
    HostMemory,
    PinnedBuffers,
    Stored,
    pinned_bytes,
    slab_count,
)
from tests.streams import Stream, Streams


def train(layers: int, prefetches: bool = True, steps: int = 2) -> Streams:
    """Inputs of layers leave behind each layer; in the backward one comes back ahead."""
    streams, host = Streams(), HostMemory()
    with streams.recording(), torch.device("cuda"):  # torch's default device, as users set it
        for _ in range(steps):
            x, inputs = torch.zeros(64, device="cuda"), list[Stored]()
            for _ in range(layers):
                output = x * 2
                inputs.append(host.store(x))
                x = output
            while inputs:
                (inputs.pop().recall()[0] + x).sum()
                if prefetches and inputs:
                    inputs[-1].fetch()
    return streams


@pytest.mark.parametrize("prefetches", [True, False])
def test_copies_are_ordered(prefetches: bool) -> None:
    streams = train(4, prefetches)
    assert len(streams.made) == 1
    # The last layer's input is still on the card when the backward begins.
    assert streams.copies == 2 * (4 * ["to the host"] + 3 * ["to the device"])


@pytest.mark.parametrize("prefetches", [True, False])
@pytest.mark.parametrize("step", ["wait_stream", "wait_event"])
def test_a_missing_wait_is_noticed(
    monkeypatch: pytest.MonkeyPatch, step: str, prefetches: bool
) -> None:
    monkeypatch.setattr(Stream, step, lambda *_: None)
    with pytest.raises(AssertionError, match="may run before|given away|may overwrite"):
        train(4, prefetches)


def test_what_is_on_its_way_back_and_nobody_asks_for_is_waited_for() -> None:
    """As after an error in a backward."""
    streams, host = Streams(), HostMemory()
    with streams.recording():
        stored = [host.store(torch.zeros(64, device="cuda") + n) for n in range(3)]
        for one in stored[:2]:
            one.fetch()
        (stored[0].recall()[0] + 1).sum()
        del stored, one
        host.store(torch.zeros(64, device="cuda"))


def test_values_return_and_buffers_are_used_again() -> None:
    host, seen = HostMemory(), set()
    with host_alone():
        for _ in range(3):
            kept = [torch.randn(5, 7, dtype=torch.bfloat16) for _ in range(4)]
            copies = [x.clone() for x in kept]
            stored = [host.store(x) for x in kept]
            seen |= {one.there[0].data_ptr() for one in stored}
            host.settle()
            del kept
            for one, copy in zip(reversed(stored), reversed(copies), strict=True):
                (back,) = one.recall()
                assert back.dtype == copy.dtype and torch.equal(back, copy)
            del stored, one
    assert len(seen) == 4, "a step takes what the one before gave back"


def test_an_input_that_is_never_asked_for_gives_its_buffer_back() -> None:
    host = HostMemory()
    with host_alone():
        stored = host.store(torch.zeros(3))
        first = stored.there[0].data_ptr()
        del stored
        assert host.store(torch.zeros(3)).there[0].data_ptr() == first


@contextmanager
def host_alone() -> Iterator[None]:
    """As if its memory were pinned, and copies done at once."""
    done = SimpleNamespace(
        wait_stream=lambda _: None, wait_event=lambda _: None, record_event=lambda: None
    )
    make = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda _: done)
        patch.setattr(torch.cuda, "current_stream", lambda _=None: done)
        patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: make(*a, **k))
        yield


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (2**30, 1),
        (335 * 10**6, 3),  # 1,005 of 1,074 MB, where torch takes 537 for each
        (5 * 2**20, 3),  # 15 of 16
        (9 * 2**20, 7),  # 63 of 64
        (2**30 + 256, 15),
    ],
)
def test_slabs_leave_little_unused(size: int, count: int) -> None:
    assert slab_count(size, 30) == count
    assert slab_count(size, 0) == 1 and slab_count(size, 4) <= 3, "few where few are used"
    one = 2 ** (size - 1).bit_length()
    for number in range(1, 65):
        assert pinned_bytes(size, number) <= 1.42 * number * one, "hardly more than one by one"
    assert pinned_bytes(size, 32) <= 1.4 * 32 * size, "twice as much one by one, of some"
    assert pinned_bytes(size, 4) <= 4 * one


def test_sizes_that_change_take_no_more_than_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a size that does not change, of two tensors a layer, four layers of a micro-batch."""
    sizes, most, same, emptied = random.Random(0), 0, 9 * 2**20, []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append(len(buffers._free)))
    with host_alone():
        buffers = PinnedBuffers()
        for _ in range(100):
            size = sizes.randrange(4 * 2**20, 8 * 2**20)
            most = max(most, size)
            taken = [buffers.take(n) for _ in range(4) for n in (size, same)]
            assert [len(x) >= n for x, n in zip(taken, 4 * [size, same], strict=True)] == 8 * [True]
            assert len({x.data_ptr() for x in taken}) == 8
            buffers.give(taken)
            there = sum(len(x) for free in buffers._free.values() for x in free)
            assert there <= 1.2 * (pinned_bytes(most, 4) + pinned_bytes(same, 4))
    assert 1 < len(emptied) < 20, "for torch keeps what is freed"


def test_buffers_are_cut_from_slabs() -> None:
    with host_alone():
        buffers = PinnedBuffers()
        taken = [buffers.take(5 * 2**20 - 3) for _ in range(6)]
        assert len(buffers.take(0)) == 256  # of what is kept of no rows
    assert {len(one) for one in taken} == {5 * 2**20}
    assert len({one.untyped_storage().data_ptr() for one in taken}) == 5  # four of one, and of 3
