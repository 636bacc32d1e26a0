"""The memory of messages: one piece a context, for one pass at a time, in an order. (fast tier)"""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Plan, Receive, Send, Step
from megatron_burst.transport import memory as module
from megatron_burst.transport.lowered import Form, Lowered, LoweredStep, forms_of
from megatron_burst.transport.memory import MessageMemory, joined, message_of
from tests.streams import Streams

CPU = torch.device("cpu")
MINE, THEIRS = Item(Kind.KV, 0), Item(Kind.KV, 1)
HOME = Item(Kind.PARTIAL_D_KV, 1)


def lowered(tokens: int, name: str = "forward") -> Lowered:
    """Of a rank that sends its block, gets another and sends a gradient meanwhile."""
    read, gradient = Channel.READ_WITHIN, Channel.GRADIENT_WITHIN
    first = Step((Receive(THEIRS, 1, read, 1, 0),), (Send(MINE, 1, read, 1),))
    plan = Plan(0, (first, Step(sends=(Send(HOME, 1, gradient, 1),))))
    return Lowered(name, plan, lambda _: [Form((1, tokens, 2, 4), torch.float32)] * 2, str)


@contextmanager
def lent(
    memory: MessageMemory, tokens: int, device: torch.device = CPU, says: bool = False
) -> Iterator[list[LoweredStep]]:
    with memory.lent(lowered(tokens), device, says) as steps:
        yield steps


def test_tensors_of_an_item_are_one_message_and_every_buffer_is_apart() -> None:
    with lent(MessageMemory(), 8) as steps:
        (_, block), ((_, written),) = steps[1].arrivals[0], steps[1].writes
        receive, send = steps[0].batches[0].messages
        for number, t in enumerate((*block, *written)):
            t.fill_(number)
        assert send.bytes is None and steps[0].batches[0].bytes_sent == 2 * 8 * 8 * 4
        assert receive.bytes is not None
        assert receive.bytes.view(torch.float32).unique_consecutive().tolist() == [0, 1]
        (home,) = steps[1].batches[0].messages
        assert home.bytes is not None
        assert home.bytes.view(torch.float32).unique_consecutive().tolist() == [2, 3]


def test_tensors_begin_where_their_dtype_and_kernels_want_it() -> None:
    block = torch.ones(3, dtype=torch.bfloat16), torch.full((5,), 2.0), torch.full((1,), 3.0)
    found = joined(block)
    assert all(map(torch.equal, found, block))
    assert [t.storage_offset() * t.element_size() for t in found] == [0, 16, 48]
    assert message_of(found).data_ptr() == found[0].data_ptr() and joined(found) is found
    assert len(message_of(found)) == len(message_of(block)) == 52


@pytest.mark.parametrize("block", [(torch.ones(4), torch.ones(4)), (torch.ones(4, 2).t(),)])
def test_what_lies_apart_is_joined_by_a_copy(block: tuple[Tensor, ...]) -> None:
    whole = torch.cat([t.flatten() for t in block])
    assert torch.equal(message_of(block).view(torch.float32), whole)


def test_on_a_gpu_the_allocator_does_not_own_what_is_sent_from_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(4)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    alias = message_of((x,))
    assert alias.data_ptr() == x.data_ptr()
    assert alias.untyped_storage()._cdata != x.untyped_storage()._cdata


def test_all_passes_have_the_same_memory_and_a_larger_one_makes_it_grow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    memory, known = MessageMemory(), lowered(64)
    pieces = list[Tensor]()
    for one in (known, lowered(8), known):
        with memory.lent(one, CPU, True) as steps:
            pieces.append(steps[1].writes[0][1][0])
        assert memory._steps[one] is steps, "made once"
    assert len({t.untyped_storage()._cdata for t in pieces}) == 1
    gone = weakref.ref(pieces[0].untyped_storage())
    del pieces, steps
    with lent(memory, 66, says=True):
        pass
    gc.collect()
    assert gone() is None, "views of plans that rest would keep the old piece"
    sizes = [line.split("keeps ")[1].split(" MiB")[0] for line in caplog.messages]
    assert len(sizes) == 2 and memory.give_back() == 8192 + 8192 // 8, "by an eighth at least"
    assert memory.give_back() == 0


def test_another_call_meanwhile_is_refused() -> None:
    memory = MessageMemory()
    with lent(memory, 8):
        with (
            pytest.raises(RuntimeError, match="a backward began while a forward of the same"),
            memory.lent(lowered(8, "backward"), CPU, False),
        ):
            pass
        with pytest.raises(RuntimeError, match="a forward goes on"):
            memory.give_back()
    with pytest.raises(ValueError), lent(memory, 8):
        raise ValueError
    with lent(memory, 8):  # an error ends a pass
        pass


def test_memory_that_was_taken_in_inference_serves_training() -> None:
    memory = MessageMemory()
    for is_inference in (True, False):
        with torch.inference_mode(is_inference), lent(memory, 8) as steps:
            (message, *_), written = steps[0].batches[0].messages, steps[1].writes[0][1][0]
            written.fill_(1)
            assert message.bytes is not None and not message.bytes.is_inference()


@pytest.mark.parametrize("follows", [True, False])
def test_a_pass_on_another_stream_waits_for_the_last_one(
    follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, memory, known = Streams(), MessageMemory(), lowered(8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if not follows:
        monkeypatch.setattr(memory, "_follow", lambda _: None)

    def passes() -> None:
        with streams.recording():
            for stream in (streams.default, torch.cuda.Stream()):
                with (
                    torch.cuda.stream(stream),
                    memory.lent(known, torch.device("cuda"), False) as steps,
                ):
                    steps[1].writes[0][1][0].fill_(1)  # the buffer is written and read
                    _ = steps[1].writes[0][1][0] + 1

    if follows:
        passes()
        return
    with pytest.raises(AssertionError, match="may"):
        passes()


def test_forms_are_those_of_tensors() -> None:
    assert forms_of((torch.ones(2, 3),)) == [((2, 3), torch.float32)]
