"""A thread that ends the process when a transfer on NCCL stalls, and says which.

On NCCL nobody waits on the host: a peer that is missing shows much later, as a hang wherever the
host next needs a result from the device. So a thread looks on, and costs the hot path nothing.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger(__name__)

type IsCompleted = Callable[[], bool]


class _Watched(NamedTuple):
    name: str
    is_completed: IsCompleted
    since: float  # seconds of the monotonic clock


def end_the_process(message: str) -> None:
    """Log the message and exit with status 1: the host may hang in a call that nothing ends."""
    logger.critical("%s", message)
    logging.shutdown()  # writes out what handlers hold
    os._exit(1)


class Watchdog:
    """Calls `on_stall` with a message if nothing gets through for longer than the time limit.

    The limit counts from the last transfer that got through, because the host posts transfers long
    before the device comes to them.
    """

    def __init__(
        self, timeout_seconds: float, on_stall: Callable[[str], None] = end_the_process
    ) -> None:
        self._timeout, self._on_stall = timeout_seconds, on_stall
        self._watched: deque[_Watched] = deque()
        self._thread: threading.Thread | None = None

    def watch(self, name: str, is_completed: IsCompleted) -> None:
        """Look after one transfer; `name` is what the message will say."""
        self._watched.append(_Watched(name, is_completed, time.monotonic()))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._look_on, name="burst-watchdog", daemon=True
            )
            self._thread.start()

    def _look_on(self) -> None:
        progress = time.monotonic()
        while True:
            while self._watched and self._watched[0].is_completed():
                self._watched.popleft()
                progress = time.monotonic()
            if self._watched:
                oldest = self._watched[0]
                waited = time.monotonic() - max(progress, oldest.since)
                if waited > self._timeout:
                    self._on_stall(f"{oldest.name}: not through after {self._timeout:g} s")
                    return
            time.sleep(min(1.0, self._timeout / 10))
