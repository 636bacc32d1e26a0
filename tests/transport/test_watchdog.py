"""The watchdog speaks before NCCL ends the process, once a stall, and ends nothing. (fast tier)"""

import queue
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_burst.plans.schedules.plan import Channel, Item, Kind, Send
from megatron_burst.transport import comm
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.lowered import Batch, Message
from megatron_burst.transport.watchdog import Watchdog

LIMIT = 100.0  # seconds
LONG = 30  # for a machine with more to do


def limit() -> float:
    return LIMIT


class Work:
    """A transfer on its way."""

    def __init__(self, is_through: bool = False) -> None:
        self.is_through = is_through

    def is_completed(self) -> bool:
        return self.is_through


class Clock:
    """Stands in for the clock by which transfers are posted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def watchdog(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)  # the test looks itself
    return Watchdog([limit], said.append)


def test_it_reports_what_is_not_through_before_nccl_ends_the_process(
    watchdog: Watchdog, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stalled = Clock(monkeypatch), Work()
    watchdog.watch("send kv of rank 0", Work(is_through=True).is_completed, limit)
    watchdog.watch("receive kv of rank 1", stalled.is_completed, limit)
    clock.now = 10.0
    watchdog.watch("receive kv of rank 2", Work().is_completed, limit)
    watchdog.look(LIMIT * 0.8)
    assert not said
    watchdog.look(LIMIT * 0.95)
    text = "receive kv of rank 1: not through after 95 s; NCCL ends the process after 100 s"
    assert said == [text]


class Adopted:
    """Stands in for a group of NCCL that was made with a limit of its own."""

    def __init__(self, seconds: float) -> None:
        self.options = SimpleNamespace(_timeout=timedelta(seconds=seconds))

    def _get_backend(self, _: torch.device) -> "Adopted":
        return self

    def send(self, *_: Any) -> None: ...


@pytest.mark.parametrize(("theirs", "reported"), [(40.0, 36.0), (600.0, 90.0)])
@pytest.mark.parametrize("at_first", [None, 500.0])
def test_a_group_that_was_adopted_has_its_own_limit_and_the_report_comes_before_any(
    theirs: float, reported: float, at_first: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    for name, made in {
        "get_backend_config": lambda _: "nccl",
        "get_rank": lambda: 0,
        "get_group_rank": lambda *_: 1,
    }.items():
        monkeypatch.setattr(dist, name, made)
    monkeypatch.setattr(comm, "post_together", lambda *_: [Work()])
    adopted = Adopted(at_first or theirs)
    groups: Any = {Channel.READ_WITHIN: adopted, Channel.READ_BETWEEN: Adopted(LIMIT)}
    communicator, said = Communicator(range(2), groups, LIMIT), list[str]()
    assert (watchdog := communicator._watchdog) is not None
    watchdog._report = said.append
    message = Message(Send(Item(Kind.KV, 0), 1, Channel.READ_WITHIN, 0), None)
    name_of = communicator.name_of
    batch = Batch("forward step 0", Channel.READ_WITHIN, 0, [message], 4, name_of)
    communicator.start(batch, {Kind.KV: torch.zeros(1)}, torch.empty(0))
    adopted.options._timeout = timedelta(seconds=theirs)  # as Megatron sets it after the first step
    watchdog.look(reported - 0.1)
    assert not said
    watchdog.look(reported + 0.1)
    assert said[0].endswith(f" s; NCCL ends the process after {theirs:g} s")


def test_a_shorter_limit_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adopted(LIMIT)
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "nccl")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    groups: Any = {Channel.READ_WITHIN: Adopted(LIMIT)}
    watchdog = Communicator(range(2), groups, LIMIT)._watchdog
    world.options._timeout = timedelta(seconds=30)
    assert watchdog is not None and watchdog._soonest() == 30


def test_a_stall_is_reported_once_and_the_next_one_again(
    watchdog: Watchdog, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slow = Clock(monkeypatch), Work()
    watchdog.watch("slow", slow.is_completed, limit)
    clock.now = 50.0
    watchdog.watch("stalled", Work().is_completed, limit)
    for now in (91.0, 95.0, 99.0):
        watchdog.look(now)
    assert [text.split(":")[0] for text in said] == ["slow"]
    slow.is_through = True  # at the last moment
    watchdog.look(139.0)
    assert len(said) == 1
    watchdog.look(140.0)
    assert [text.split(":")[0] for text in said] == ["slow", "stalled"]


def test_it_is_silent_while_things_get_through_and_when_nothing_is_awaited(
    watchdog: Watchdog, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    for number in range(8):
        clock.now, work = number * LIMIT / 2, Work()
        watchdog.watch("work", work.is_completed, limit)
        watchdog.look(clock.now + 0.8 * LIMIT)
        work.is_through = True
    watchdog.look(100 * LIMIT)
    assert not said


def test_one_thread_looks_on_from_the_first_transfer_and_the_process_goes_on() -> None:
    before, said = threads(), queue.Queue[str]()
    watchdog = Watchdog([lambda: 0.2], said.put)
    assert not threads() - before
    works = [Work() for _ in range(3)]
    for number, work in enumerate(works):
        watchdog.watch(f"work {number}", work.is_completed, limit)
        assert len(threads() - before) == 1
    assert said.get(timeout=LONG).startswith("work 0: not through after ")
    for work in works:
        work.is_through = True
    watchdog.watch("work 3", Work().is_completed, limit)
    assert said.get(timeout=LONG).startswith("work 3: ")
    (thread,) = threads() - before
    del watchdog  # as its context is gone
    thread.join(LONG)
    assert not thread.is_alive()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "burst-watchdog"}
