"""The watchdog speaks before NCCL ends the process, once a stall, and ends nothing. (fast tier)"""

import queue
import threading
import time

import pytest

from megatron_burst.transport.watchdog import Watchdog

LIMIT = 100.0  # seconds
LONG = 30  # for a machine with more to do


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
    return Watchdog(LIMIT, said.append)


def test_it_reports_what_is_not_through_before_nccl_ends_the_process(
    watchdog: Watchdog, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stalled = Clock(monkeypatch), Work()
    watchdog.watch("send kv of rank 0", Work(is_through=True).is_completed)
    watchdog.watch("receive kv of rank 1", stalled.is_completed)
    clock.now = 10.0
    watchdog.watch("receive kv of rank 2", Work().is_completed)
    watchdog.look(LIMIT * 0.8)
    assert not said
    watchdog.look(LIMIT * 0.95)
    text = "receive kv of rank 1: not through after 95 s; NCCL ends the process after 100 s"
    assert said == [text]


def test_seconds_of_long_limits_are_written_out(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    Clock(monkeypatch)
    watchdog = Watchdog(36_000.0, said.append)
    watchdog.watch("send kv of rank 0", Work().is_completed)
    watchdog.look(32_400.4)
    assert "after 32400 s; NCCL ends the process after 36000 s" in said[0]


def test_a_stall_is_reported_once_and_the_next_one_again(
    watchdog: Watchdog, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slow = Clock(monkeypatch), Work()
    watchdog.watch("slow", slow.is_completed)
    clock.now = 50.0
    watchdog.watch("stalled", Work().is_completed)
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
        watchdog.watch("work", work.is_completed)
        watchdog.look(clock.now + 0.8 * LIMIT)
        work.is_through = True
    watchdog.look(100 * LIMIT)
    assert not said


def test_one_thread_looks_on_from_the_first_transfer_and_the_process_goes_on() -> None:
    before, said = threads(), queue.Queue[str]()
    watchdog = Watchdog(0.2, said.put)
    assert not threads() - before
    works = [Work() for _ in range(3)]
    for number, work in enumerate(works):
        watchdog.watch(f"work {number}", work.is_completed)
        assert len(threads() - before) == 1
    assert said.get(timeout=LONG).startswith("work 0: not through after ")
    for work in works:
        work.is_through = True
    watchdog.watch("work 3", Work().is_completed)
    assert said.get(timeout=LONG).startswith("work 3: ")


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "burst-watchdog"}
