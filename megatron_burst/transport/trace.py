"""Records when the tiles, sums and messages of attention happen; off, it does nothing.

Every transport has a recorder, so that whoever carries out a plan finds it there. It is off until
`start`. No tensor is kept, and on a GPU the host waits for nothing before the record is read.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch

from megatron_burst.plans.plan import Plan, Receive, Send, Tile

_OFF = nullcontext()


class Activity(StrEnum):
    """What a rank spends time on within a call."""

    POST = "post"
    TILE = "tile"
    SUM = "sum"  # a partial result or gradient is added to others
    WAIT = "wait"  # for messages to land


class Clock(Protocol):
    """Where times come from; a mark is a moment that may be read only later."""

    def start(self) -> None:
        """Make now the moment that times are counted from."""

    def mark(self) -> Any:
        """Return this moment."""

    def settle(self) -> None:
        """Wait until every mark can be read."""

    def seconds(self, mark: Any) -> float:
        """Return the time from the start to a mark."""


class HostClock:
    """For tensors on the CPU, where the host computes and waits."""

    def __init__(self) -> None:
        self._zero = 0

    def start(self) -> None:
        """Make now the moment that times are counted from."""
        self._zero = time.perf_counter_ns()

    def mark(self) -> int:
        """Return this moment."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Nothing to wait for."""

    def seconds(self, mark: int) -> float:
        """Return the time from the start to a mark."""
        return (mark - self._zero) / 1e9


class DeviceClock:
    """For tensors on a GPU: CUDA events on the current stream, which are read at the end.

    A wait is then the time for which the stream, not the host, stood still.
    """

    def __init__(self) -> None:
        self._zero: Any = None

    def start(self) -> None:
        """Make now the moment that times are counted from: waits for the device, once."""
        torch.cuda.synchronize()
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Return the moment at which the current stream comes to this point."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until every mark can be read."""
        torch.cuda.synchronize()

    def seconds(self, mark: torch.cuda.Event) -> float:
        """Return the time from the start to a mark."""
        return self._zero.elapsed_time(mark) / 1e3


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, between two marks of the clock."""

    activity: Activity
    plan_step: int
    start: Any
    stop: Any
    tile: Tile | None = None
    messages: Sequence[tuple[Send | Receive, int]] = ()  # of a post, with their bytes


@dataclass(slots=True)
class Call:
    """One plan carried out: a forward, a backward or an all-to-all over the heads."""

    name: str
    training_step: int
    plan: Plan
    ranks: Sequence[int]  # the job's number of each rank of the plan
    start: Any = None
    stop: Any = None
    spans: list[Span] = field(default_factory=list)


class Recorder:
    """What one process does for attention, call by call, between `start` and `stop`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.calls: list[Call] = []
        self.started_at: int | None = None
        """Nanoseconds since the epoch at the first start."""
        self._training_step: int | None = None
        self._call: Call | None = None

    def start(self, training_step: int) -> None:
        """Record from now on, as a part of this training step."""
        if self.started_at is None:
            self.clock.start()
            self.started_at = time.time_ns()
        self._training_step = training_step

    def stop(self) -> None:
        """Record nothing until the next start."""
        self._training_step = None

    def call(self, name: str, plan: Plan, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """Record what happens inside as the carrying out of this plan."""
        if self._training_step is None:
            return _OFF
        return self._recorded(Call(name, self._training_step, plan, ranks))

    def tile(self, plan_step: int, tile: Tile) -> AbstractContextManager[None]:
        """Time the kernel call of a tile."""
        return self._timed(Activity.TILE, plan_step, tile) if self._call else _OFF

    def sum(self, plan_step: int) -> AbstractContextManager[None]:
        """Time additions to what is there."""
        return self._timed(Activity.SUM, plan_step) if self._call else _OFF

    def post(
        self, plan_step: int, messages: Iterable[tuple[Send | Receive, int]]
    ) -> AbstractContextManager[None]:
        """Time the posting of messages, each tensor given with its bytes."""
        if not self._call:
            return _OFF
        sizes: Counter[Send | Receive] = Counter()
        for transfer, size in messages:
            sizes[transfer] += size
        return self._timed(Activity.POST, plan_step, None, tuple(sizes.items()))

    def wait(self, plan_step: int) -> AbstractContextManager[None]:
        """Time the wait for all that lands in a step."""
        return self._timed(Activity.WAIT, plan_step) if self._call else _OFF

    @contextmanager
    def _recorded(self, call: Call) -> Iterator[None]:
        self._call, call.start = call, self.clock.mark()
        try:
            yield
        finally:
            self._call = None
        call.stop = self.clock.mark()
        self.calls.append(call)  # one that failed is left out

    @contextmanager
    def _timed(
        self,
        activity: Activity,
        plan_step: int,
        tile: Tile | None = None,
        messages: Sequence[tuple[Send | Receive, int]] = (),
    ) -> Iterator[None]:
        assert self._call is not None
        start = self.clock.mark()
        yield
        stop = self.clock.mark()
        self._call.spans.append(Span(activity, plan_step, start, stop, tile, messages))


def make_recorder() -> Recorder:
    """Return a recorder, which is off, for the device that this process trains on."""
    return Recorder(DeviceClock() if torch.cuda.is_available() else HostClock())
