"""A thread that says which transfer on NCCL does not get through, before NCCL ends the process.

On NCCL nobody waits on the host: a peer that is missing shows much later, as a hang wherever the
host next needs a result from the device. So a thread looks on, and costs the hot path nothing.
NCCL's own watchdog ends the process at the time limit, and dumps its flight recorder; but it knows
neither step nor tensor.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

type IsCompleted = Callable[[], bool]
type Limit = Callable[[], float]  # the seconds after which NCCL ends the process, as they are now

_SHARE = 0.9  # of the time limit, after which a transfer is reported


class _Watched(NamedTuple):
    name: object
    is_completed: IsCompleted
    limit: Limit
    since: float  # seconds of the monotonic clock


class Watchdog:
    """Reports each stall once, shortly before the shortest of some time limits.

    It counts from when the host posted the transfer: so does NCCL's. Limits are asked for at every
    look: --distributed-timeout-seconds-after-init changes those of Megatron's groups.
    """

    def __init__(
        self, limits: Sequence[Limit], report: Callable[[str], None] = logger.critical
    ) -> None:
        self._limits, self._report = limits, report
        self._watched: deque[_Watched] = deque()
        self._reported: _Watched | None = None
        self._thread: threading.Thread | None = None

    def watch(self, name: object, is_completed: IsCompleted, limit: Limit) -> None:
        """Look after a transfer that NCCL gives so long; `str(name)` is for the message."""
        self._watched.append(_Watched(name, is_completed, limit, time.monotonic()))
        if self._thread is None:
            mine = weakref.ref(self)
            self._thread = threading.Thread(
                target=self._look_on, args=(mine,), name="burst-watchdog", daemon=True
            )
            self._thread.start()

    def look(self, now: float) -> None:
        """Forget what is through at this second, and report the oldest of the others if it is due.

        All others were posted later, and most of them wait for it.
        """
        while self._watched and self._watched[0].is_completed():
            self._watched.popleft()
        if not self._watched or self._watched[0] is self._reported:
            return
        oldest = self._watched[0]
        if now - oldest.since >= _SHARE * self._soonest():
            self._reported = oldest
            self._report(
                f"{oldest.name}: not through after {now - oldest.since:.0f} s; NCCL ends the "
                f"process after {oldest.limit():g} s"
            )

    def _soonest(self) -> float:
        return min(limit() for limit in self._limits)

    @staticmethod
    def _look_on(mine: "Callable[[], Watchdog | None]") -> None:
        while (watchdog := mine()) is not None:  # its context is still there
            watchdog.look(time.monotonic())
            pause = min(1.0, watchdog._soonest() / 20)
            del watchdog
            time.sleep(pause)
