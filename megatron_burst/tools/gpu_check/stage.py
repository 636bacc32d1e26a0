"""What a stage is given, and what it answers."""

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron_burst.kernels import KERNELS, Kernel, Request
from megatron_burst.tools.live_bytes import LiveBytes

DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a stage: what was found, what is allowed, and whether that holds."""

    name: str
    found: str
    allowed: str = ""  # nothing where it is only told
    passed: bool = True


def at_most(
    name: str, value: float, allowed: float, form: str = "{:.3g}", *, more: str = ""
) -> Check:
    """Return a line that fails above `allowed`, and with NaN."""
    return Check(name, form.format(value) + more, f"<= {allowed:g}", value <= allowed)


def at_least(name: str, value: float, allowed: float, *, more: str = "") -> Check:
    """Return a line that fails below `allowed`, and with NaN."""
    return Check(name, f"{value:.3f}{more}", f">= {allowed:g}", value >= allowed)


@dataclass(frozen=True, slots=True)
class Device:
    """What is looked at, and how: on a GPU sizes that say something, elsewhere small ones."""

    device: torch.device
    folder: Path  # for what a stage writes
    ranks: int = 4  # of the stage of several processes
    say: Callable[[str], None] = lambda _: None  # what takes long, before it does

    @property
    def is_gpu(self) -> bool:
        """Whether times say something."""
        return self.device.type == "cuda"

    def judged(self, check: Check) -> Check:
        """Return a line about time, of which nothing is asked without a GPU."""
        return check if self.is_gpu else Check(check.name, check.found)

    def kernels(self, heads: int, kv_heads: int, dim: int) -> dict[str, Kernel]:
        """Return what serves bfloat16 of such a shape, and nothing slow."""
        request = Request(self.device, DTYPE, heads, kv_heads, dim, dim)
        names = (name for name in KERNELS if name != "reference")
        return {n: KERNELS[n] for n in names if not KERNELS[n].reasons_against(request)}

    def synchronize(self) -> None:
        """Wait for the device; an error of a kernel shows here."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def guarded(self, checks: Iterable[Check], name: str = "") -> Iterator[Check]:
        """Yield checks, and as a failure what making them raises: the rest runs all the same."""
        try:
            yield from checks
            self.synchronize()
        except Exception as error:
            where = traceback.format_exc(limit=-3).strip()
            yield Check(f"{name}{type(error).__name__}", f"{error}\n{where}", passed=False)

    def mark(self) -> Any:
        """Return now, on the current stream; see `between`."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that the device has passed."""
        return begin.elapsed_time(end) / 1e3 if self.is_gpu else end - begin

    def timed(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call, of a first one with what the host compiles meanwhile."""
        begin, _, end = self.mark(), run(), self.mark()
        self.synchronize()
        return self.between(begin, end)

    def seconds(self, run: Callable[[], object], repetitions: int = 5) -> float:
        """Return the median of some calls, after one that does not count."""
        return median([self.timed(run) for _ in range(repetitions + 1)][1:])

    def peak(self, run: Callable[[], object], existing: Iterable[Tensor]) -> int:
        """Return the most bytes that a call takes beside the existing tensors."""
        if not self.is_gpu:
            with LiveBytes(existing) as live:
                run()
            return live.peak
        self.free()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def left_behind(self, run: Callable[[], object]) -> int:
        """Return by how many bytes three calls leave more behind than one."""
        with LiveBytes() as live:

            def now() -> int:
                run()
                self.synchronize()
                gc.collect()
                return torch.cuda.memory_allocated(self.device) if self.is_gpu else live.now

            first, _, last = now(), now(), now()
        return last - first

    def free(self) -> None:
        """Give back what earlier stages have left."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of what is expected; inf for NaN."""
    actual, expected = actual.double(), expected.double()
    size = expected.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return ((actual - expected).norm() / size).nan_to_num(nan=torch.inf).item()
