"""Micro-batches that are prepared before they come, on stand-ins. (fast tier)

tests/training has the same with Megatron's loop.
"""

import logging
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention import preparing
from megatron_burst.attention.preparing import adopt, plan_ahead, prepare
from megatron_burst.attention.saved import AttentionMemory
from tests.workers import Team, WorkerPool

pytest.importorskip("megatron.training.models.gpt")
from megatron.core import rerun_state_machine  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode  # noqa: E402

from megatron_burst.plugin.attention.ahead import Ahead, DataIterators, OneAhead  # noqa: E402
from megatron_burst.plugin.attention.documents import PackedDocuments, digest_of  # noqa: E402

TOKENS = 8
ALONE: Any = SimpleNamespace(size=lambda: 1)  # a group of one rank


def item(*bounds: int, samples: int = 1) -> dict[str, Any]:
    """What Megatron's data set gives: borders of each sample, filled up with the last."""
    rows = torch.tensor([[*bounds, *[TOKENS] * 3]] * samples, dtype=torch.int32)
    return {"cu_seqlens": rows, "tokens": torch.zeros(samples, TOKENS)}


def packed(*bounds: int) -> PackedSeqParams:
    """What Megatron's scripts make of it on the device."""
    borders = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(
        "thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=5,
        tokens_per_sample=TOKENS,
    )


def read(given: PackedSeqParams) -> PackedDocuments:
    bounds = tuple(given.cu_seqlens_q.tolist())
    if [*bounds] != sorted(bounds):
        raise ValueError(f"borders fall: {bounds}")
    return PackedDocuments(cu_seqlens_q=given.cu_seqlens_q, bounds=bounds)


class Shared:
    """Stands in for what the layers share; notes what is planned."""

    config = BurstConfig(timeout_seconds=60.0)

    def __init__(self, seconds: float = 0.0) -> None:
        self.planned: list[tuple[int, ...]] = []
        self._seconds = seconds

    def kinds(self) -> dict[Any, Any]:
        return {}

    def plan_ahead(self, documents: PackedDocuments, _: Any) -> list[Any]:
        time.sleep(self._seconds)
        self.planned.append(documents.bounds)
        return [(SimpleNamespace(adopt=lambda _: None), {})]


def watching(items: list[Any], shared: Any = None) -> tuple[Ahead, RerunDataIterator]:
    ahead, iterator = Ahead(shared or Shared(), TOKENS), RerunDataIterator(iter(items))
    ahead.read_ahead([iterator], ALONE)
    return ahead, iterator


# Data iterators.


def test_items_come_in_order_and_one_is_known_before() -> None:
    announced: list[int] = []
    items = OneAhead(iter(range(4)), lambda _, item: announced.append(item))
    for number in range(4):
        assert next(items) == number
        assert announced == [*range(1, min(number + 2, 4))]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(items)


def test_an_error_comes_in_its_turn_and_what_follows_it_is_not_lost() -> None:
    class Items:
        number = 0

        def __next__(self) -> int:
            self.number += 1
            if self.number == 2:
                raise OSError("a file is gone")
            return self.number

    items = OneAhead(Items(), lambda *_: None)  # type: ignore[arg-type]
    assert next(items) == 1
    with pytest.raises(OSError, match="a file is gone"):
        next(items)
    assert [next(items), next(items)] == [3, 4]


def test_a_step_that_megatron_repeats_reads_the_same_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(get_mode=lambda: RerunMode.VALIDATE_RESULTS)
    monkeypatch.setattr(rerun_state_machine, "get_rerun_state_machine", lambda: state)
    _, iterator = watching([item(0, n, TOKENS) for n in range(1, 5)])
    first = [next(iterator) for _ in range(2)]
    iterator.rewind()
    again = [next(iterator) for _ in range(2)]
    assert all(x["cu_seqlens"] is y["cu_seqlens"] for x, y in zip(first, again, strict=True))
    iterator.advance()
    assert next(iterator)["cu_seqlens"][0, 1] == 3


def test_lists_of_iterators_and_ranks_without_one() -> None:
    """Of virtual stages, of several validation sets, of tensor-parallel ranks."""
    iterators = [RerunDataIterator(iter([1, 2])) for _ in range(3)]
    built = (iterators[0], iterators[1:], None)
    seen: list[Any] = []
    data = DataIterators(lambda provider: built)
    assert data("provider") is built and not isinstance(iterators[0].iterable, OneAhead)
    data.ahead = SimpleNamespace(read_ahead=lambda found, group: seen.extend(found))  # type: ignore
    with pytest.MonkeyPatch.context() as patch:
        where = "megatron.core.parallel_state.get_tensor_and_context_parallel_group"
        patch.setattr(where, lambda: ALONE)
        assert data("provider") is built
    assert seen == iterators


# One rank.


def test_a_micro_batch_is_found_by_its_borders_with_its_own_tensors() -> None:
    shared = Shared()
    ahead, iterator = watching([item(0, n, TOKENS) for n in (1, 2, 3)], shared)
    next(iterator)
    first = ahead.documents_of(packed(0, 1, TOKENS), read)
    assert first.bounds == (0, 1, TOKENS) and shared.planned == [], "nobody knew it"
    ahead.plan_next(read)
    given = packed(0, 2, TOKENS)
    second = ahead.documents_of(given, pytest.fail)
    assert second.bounds == (0, 2, TOKENS) and shared.planned == [second.bounds]
    assert second.cu_seqlens_q is given.cu_seqlens_q, "not the host's"
    assert ahead.documents_of(packed(0, 2, TOKENS), pytest.fail).masks is second.masks, "again"
    assert ahead.documents_of(packed(0, 5, TOKENS), read).bounds == (0, 5, TOKENS), "another order"


def test_samples_of_a_micro_batch_are_one_sequence() -> None:
    shared = Shared()
    ahead, iterator = watching([item(0, TOKENS)] + [item(0, 3, TOKENS, samples=2)], shared)
    next(iterator)
    ahead.plan_next(read)
    ahead.documents_of(packed(0, 3, TOKENS, TOKENS + 3, 2 * TOKENS), pytest.fail)


def test_what_is_wrong_with_documents_is_said_when_they_come() -> None:
    ahead, iterator = watching([item(0, TOKENS), item(0, 9, 9)])
    next(iterator)
    ahead.plan_next(read)
    for _ in range(2):
        ahead.documents_of(packed(0, TOKENS), read)
    with pytest.raises(ValueError, match="borders fall"):
        ahead.documents_of(packed(0, 9, 9, TOKENS), pytest.fail)


def test_an_iterator_of_something_else_announces_nothing() -> None:
    shared = Shared()
    ahead, iterator = watching([(1, 2), (3, 4), {"tokens": 5}, {"cu_seqlens": None}], shared)
    for _ in range(4):
        next(iterator)
        ahead.plan_next(read)
    assert (
        ahead.documents_of(packed(0, TOKENS), read).bounds == (0, TOKENS) and shared.planned == []
    )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("megatron_burst")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, "megatron_burst"):
        yield caplog
    logger.propagate = before


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_wait_is_shown_where_there_is_one(log: pytest.LogCaptureFixture, seconds: float) -> None:
    ahead, iterator = watching([item(0, TOKENS), item(0, 3, TOKENS)], Shared(seconds))
    next(iterator)
    ahead.plan_next(read)
    if not seconds:
        ahead._under_way[-1].result()  # as much as a forward takes
    with torch.profiler.profile() as profiler:
        ahead.documents_of(packed(0, 3, TOKENS), pytest.fail)
    names = [event.name for event in profiler.events()]
    assert ("burst: wait for the plan" in names) == bool(seconds)
    assert ("documents: waited" in log.text) == bool(seconds)


# Plans.


def asked_of(context: BurstContext, documents: tuple[int, ...]) -> list[Any]:
    """What a layer with a window and one without ask, the second in two passes."""
    x, found = torch.zeros(1, TOKENS, 2, 8), []
    mask = Mask.causal(documents=documents)
    found.append(prepare(context, x, x, x, Mask.causal(window=2, documents=documents), 0.5))
    memory = AttentionMemory(0.5)
    found.append(prepare(context, x, x, x, mask, 1.0, memory=memory))
    memory.save(4, x, x[..., 0].transpose(1, 2))
    found.append(prepare(context, x, x, x, mask, 1.0, memory=memory))
    return found


def test_plans_ahead_are_those_that_layers_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    context, fresh = (BurstContext.create(BurstConfig()) for _ in range(2))
    asked_of(context, (0, 3, TOKENS))
    next_ones = (0, 1, 5, TOKENS)

    def mask_of(mask: Mask) -> Mask:
        return Mask.causal(window=mask.window, documents=next_ones)

    assert plan_ahead(context, context.kept.document_calls, 2 * TOKENS, mask_of, None) == {}, (
        "a sequence of another length"
    )
    before = dict(context.kept.calls)
    plans = plan_ahead(context, context.kept.document_calls, TOKENS, mask_of, None)
    assert len(plans) == 3 and context.kept.calls == before
    adopt(context, plans)
    expected = asked_of(fresh, next_ones)
    monkeypatch.setattr(preparing, "_plan", lambda *_: pytest.fail("planned again"))
    for call, other in zip(asked_of(context, next_ones), expected, strict=True):
        for name in ("forward_plan", "backward_plan", "scale", "first_saved_row"):
            assert getattr(call, name) == getattr(other, name), name


# Several ranks; 0, 2, … have iterators.


def _ranks(team: Team, bounds: list[int]) -> Any:
    ahead, iterator = Ahead(Shared(), TOKENS), None  # type: ignore[arg-type]
    if team.rank % 2 == 0:
        iterator = RerunDataIterator(iter([item(0, TOKENS), item(0, bounds[team.rank], TOKENS)]))
    ahead.read_ahead([] if iterator is None else [iterator], team.group)
    if iterator is not None:
        next(iterator)
    ahead.plan_next(read)
    try:
        found = ahead.documents_of(packed(0, bounds[0], TOKENS), lambda _: PackedDocuments())
    except ValueError as error:
        return str(error)
    return found.bounds


def test_ranks_without_an_iterator_learn_the_documents(workers: WorkerPool) -> None:
    assert workers.run(8, _ranks, [3] * 8) == [(0, 3, TOKENS)] * 8


def _ranks_of_which_one_cannot(team: Team) -> str:
    shared = Shared()
    if team.rank == 1:
        shared.plan_ahead = lambda *_: _no_kernel()  # type: ignore[method-assign]
    ahead = Ahead(shared, TOKENS)  # type: ignore[arg-type]
    iterator = RerunDataIterator(iter([item(0, TOKENS), item(0, 3, TOKENS)]))
    ahead.read_ahead([iterator], team.group)
    next(iterator)
    ahead.plan_next(read)
    try:
        ahead.documents_of(packed(0, 3, TOKENS), pytest.fail)
    except ValueError as error:
        return str(error)
    return "no error"


def _no_kernel() -> Any:
    raise ValueError("no kernel here")


def test_what_one_rank_cannot_plan_ahead_no_other_takes(workers: WorkerPool) -> None:
    first, second, third, *_ = workers.run(8, _ranks_of_which_one_cannot)
    assert second == "no kernel here"
    assert first == third == "documents cannot be prepared: rank 1: no kernel here"


def test_ranks_with_other_documents_are_an_error_of_all(workers: WorkerPool) -> None:
    """Not one that hangs."""
    texts = workers.run(8, _ranks, [3, 3, 3, 3, 5, 3, 3, 3])
    assert len(set(texts)) == 1
    first, *listed = texts[0].splitlines()
    assert first == "the context-parallel ranks disagree on the documents of a micro-batch:"
    digests = [line.partition("digests ")[2] for line in listed]
    expected = [digest_of(packed(0, n, TOKENS)).hex() for n in [3, 3, 3, 3, 5, 3, 3, 3]]
    assert digests == expected
