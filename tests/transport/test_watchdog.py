"""The watchdog speaks when nothing gets through any more, and not before. (fast tier)"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_burst.transport.watchdog import Watchdog, end_the_process
from tests.workers import forkserver

LIMIT = 0.4  # seconds
LONG = 30  # for a machine with more to do


class Work:
    """Is completed from the given time on."""

    def __init__(self, completed_at: float = float("inf")) -> None:
        self.completed_at = completed_at

    def is_completed(self) -> bool:
        return time.monotonic() >= self.completed_at


@pytest.fixture
def said() -> queue.Queue[tuple[str, float]]:
    """What the watchdog says, and when."""
    return queue.Queue()


@pytest.fixture
def watchdog(said: queue.Queue[tuple[str, float]]) -> Watchdog:
    return Watchdog(LIMIT, lambda message: said.put((message, time.monotonic())))


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "burst-watchdog"}


def test_it_says_what_is_not_through_after_the_limit(
    watchdog: Watchdog, said: queue.Queue[tuple[str, float]]
) -> None:
    began = time.monotonic()
    watchdog.watch("send kv of rank 0", Work(began).is_completed)
    watchdog.watch("receive kv of rank 1", Work().is_completed)
    watchdog.watch("receive kv of rank 2", Work(began).is_completed)
    message, when = said.get(timeout=LONG)
    assert message == "receive kv of rank 1: not through after 0.4 s"
    assert when - began >= LIMIT


def test_the_limit_counts_from_the_last_that_got_through(
    watchdog: Watchdog, said: queue.Queue[tuple[str, float]]
) -> None:
    # The host posts much at once; the device needs its time for each.
    began = time.monotonic()
    for number in range(1, 8):
        watchdog.watch(f"work {number}", Work(began + number * LIMIT / 2).is_completed)
    watchdog.watch("stalled", Work().is_completed)
    message, when = said.get(timeout=LONG)
    assert message.startswith("stalled: ")
    assert when - began >= (7 / 2 + 1) * LIMIT


def test_it_is_silent_while_things_get_through_and_when_nothing_is_awaited(
    watchdog: Watchdog, said: queue.Queue[tuple[str, float]]
) -> None:
    end = time.monotonic() + 3 * LIMIT
    while time.monotonic() < end:
        watchdog.watch("work", Work(time.monotonic() + LIMIT / 4).is_completed)
        time.sleep(LIMIT / 8)
    time.sleep(2 * LIMIT)
    assert said.empty()
    began = time.monotonic()  # an idle time does not count either
    watchdog.watch("stalled", Work().is_completed)
    _, when = said.get(timeout=LONG)
    assert when - began >= LIMIT


def test_there_is_one_thread_and_none_before_the_first_transfer(
    said: queue.Queue[tuple[str, float]],
) -> None:
    before = threads()
    watchdog = Watchdog(LIMIT, lambda message: said.put((message, 0)))
    assert not threads() - before
    for _ in range(3):
        watchdog.watch("work", Work().is_completed)
        assert len(threads() - before) == 1
    said.get(timeout=LONG)  # it speaks once and ends
    end = time.monotonic() + LONG
    while threads() - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not threads() - before and said.empty()


def stall(log: str, on_stall: Callable[[str], None]) -> None:
    logging.getLogger().addHandler(logging.FileHandler(log))
    Watchdog(LIMIT, on_stall).watch("receive kv of rank 1", Work().is_completed)
    time.sleep(2 * LONG)  # as a host that hangs


def test_by_default_it_ends_a_process_that_hangs_and_says_why(tmp_path: Path) -> None:
    server = forkserver()
    log = tmp_path / "log"
    process = server.Process(target=stall, args=(str(log), end_the_process), daemon=True)
    process.start()
    process.join(LONG)
    try:
        assert process.exitcode == 1
        assert log.read_text() == "receive kv of rank 1: not through after 0.4 s\n"
    finally:
        process.kill()
