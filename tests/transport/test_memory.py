"""The memory of messages: a pass's own for as long as it goes on. (fast tier)"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Plan, Receive, Send, Step
from megatron_burst.tools.live_bytes import LiveBytes
from megatron_burst.transport.lowered import Form, Lowered, LoweredStep, forms_of
from megatron_burst.transport.memory import MessageMemory, message_of, side_by_side
from tests.oracle import relative_error

CPU = torch.device("cpu")
MINE, THEIRS = Item(Kind.KV, 0), Item(Kind.KV, 1)
HOME = Item(Kind.PARTIAL_D_KV, 1)


def lowered(tokens: int, name: str = "forward") -> Lowered:
    """Of a rank that sends its block, gets another and sends a gradient meanwhile."""
    read, gradient = Channel.READ_WITHIN, Channel.GRADIENT_WITHIN
    first = Step((Receive(THEIRS, 1, read, 1),), (Send(MINE, 1, read, 1),))
    plan = Plan(0, (first, Step(sends=(Send(HOME, 1, gradient, 1),))))
    return Lowered(name, plan, lambda _: [Form((1, tokens, 2, 4), torch.float32)] * 2, str)


@contextmanager
def lent(
    memory: MessageMemory, some: Lowered, device: torch.device = CPU
) -> Iterator[tuple[list[LoweredStep], list[Tensor]]]:
    """Lend it, with the bytes of its three messages: a receive, the block, a gradient."""
    with memory.lent(some, device) as (steps, sent):
        messages = [m for step in steps for batch in step.batches for m in batch.messages]
        own = {Kind.KV: torch.empty(0, dtype=torch.uint8)}
        yield steps, [message.bytes(own, sent) for message in messages]


def test_a_nan_is_no_small_error() -> None:
    """`max` would pass over it; and the pool's memory of messages is NaN where nothing stays."""
    assert relative_error(torch.tensor([torch.nan, 1.0]), torch.ones(2)) == float("inf")


def test_tensors_of_an_item_are_one_message_and_every_buffer_is_apart() -> None:
    with lent(MessageMemory(), lowered(8)) as (steps, (received, sent, home)):
        (_, block), ((_, written),) = steps[1].arrivals[0], steps[1].writes
        for number, t in enumerate((*block, *written)):
            t.fill_(number)
        assert not len(sent) and steps[0].batches[0].bytes_sent == 2 * 8 * 8 * 4
        assert received.view(torch.float32).unique_consecutive().tolist() == [0, 1]
        assert home.view(torch.float32).unique_consecutive().tolist() == [2, 3]


def test_tensors_begin_where_their_dtype_and_kernels_want_it() -> None:
    block = torch.ones(3, dtype=torch.bfloat16), torch.full((5,), 2.0), torch.full((1,), 3.0)
    found = side_by_side(block)
    assert all(map(torch.equal, found, block))
    assert [t.storage_offset() * t.element_size() for t in found] == [0, 16, 48]
    assert message_of(found).data_ptr() == found[0].data_ptr() and side_by_side(found) is found
    assert len(message_of(found)) == len(message_of(block)) == 52


@pytest.mark.parametrize("block", [(torch.ones(4), torch.ones(4)), (torch.ones(4, 2).t(),)])
def test_what_lies_apart_is_joined_by_a_copy(block: tuple[Tensor, ...]) -> None:
    whole = torch.cat([t.flatten() for t in block])
    assert torch.equal(message_of(block).view(torch.float32), whole)


@pytest.mark.parametrize("begin", [0, 4])
def test_on_a_gpu_the_allocator_does_not_own_what_is_sent(
    begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cudaMallocAsync it knows no address but the first of a storage."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    whole = torch.arange(8.0)
    alias = message_of((x := whole[begin:],))
    assert alias.data_ptr() == x.data_ptr() and len(alias) == x.nbytes
    assert alias.untyped_storage()._cdata != x.untyped_storage()._cdata
    assert alias.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    with lent(MessageMemory(), lowered(8)) as (steps, (received, _, home)):
        block, made = steps[1].arrivals[0][1][0], steps[1].writes[0][1][0]
        for alias, t in ((received, block), (home, made)):
            assert alias.data_ptr() == t.data_ptr()
            assert alias.untyped_storage()._cdata != t.untyped_storage()._cdata


@pytest.mark.parametrize("on_gpu", [False, True])
def test_memory_is_a_passs_own_while_it_goes_on_and_views_are_made_once(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: on_gpu))
    memory, known, between = MessageMemory(), lowered(64), []
    first = None
    for number in range(3):
        with LiveBytes() as live, lent(memory, known) as (steps, (received, _, _)):
            assert on_gpu or live.now == known.size
            block = steps[1].arrivals[0][1][0]
            assert first is None or steps is first, "made once"
            first, storage = steps, block.untyped_storage()
            block.fill_(number)
            assert received[:4].view(torch.float32) == number, "wherever it lies"
        assert (on_gpu or not live.now) and not storage.nbytes(), "nothing is kept"
        between.append(torch.empty(known.size, dtype=torch.uint8))  # it lies elsewhere next


def test_another_call_meanwhile_is_refused() -> None:
    memory = MessageMemory()
    with (
        lent(memory, lowered(8)),
        pytest.raises(RuntimeError, match="a backward began while a forward of the same"),
        lent(memory, lowered(8, "backward")),
    ):
        pass
    with pytest.raises(ValueError), lent(memory, known := lowered(8)) as (steps, _):
        raise ValueError
    assert steps[1].arrivals[0][1][0].untyped_storage().nbytes() == known.size, "on their way"
    with lent(memory, known):  # an error ends a pass
        pass


def test_passes_without_messages_go_on_beside_any() -> None:
    """A rank alone may call in several threads."""
    memory, alone = MessageMemory(), Lowered("forward", Plan(0, (Step(),)), lambda _: [], str)
    with memory.lent(alone, CPU), memory.lent(alone, CPU), lent(memory, lowered(8)):
        with memory.lent(alone, CPU):
            pass
        with pytest.raises(RuntimeError, match="goes on"), lent(memory, lowered(8)):
            pass


def test_memory_that_was_taken_in_inference_serves_training() -> None:
    memory, known = MessageMemory(), lowered(8)
    for is_inference in (True, False):
        with torch.inference_mode(is_inference), lent(memory, known) as (steps, (received, *_)):
            written = steps[1].writes[0][1][0]
            written.fill_(1)
            assert not written.is_inference() and not steps[1].arrivals[0][1][0].is_inference()


def test_forms_are_those_of_tensors() -> None:
    assert forms_of((torch.ones(2, 3),)) == [((2, 3), torch.float32)]
