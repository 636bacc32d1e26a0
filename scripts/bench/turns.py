"""Repetitions that take turns, what is said of their times, and whether others use the machine."""

import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

MAX_LOAD, MAX_BUSY = 0.5, 0.1
PATIENCE_SECONDS = 300.0  # the load of a benchmark before takes two minutes to be forgotten


def in_turns[Name, Result](
    ways: Mapping[Name, Callable[[], Result]],
    repetitions: int,
    *,
    seed: int = 0,
    warm_up: int = 1,
    says: str = "",
) -> dict[Name, list[Result]]:
    """Call every way `repetitions` times, in a new order each time; return what the calls returned.

    The order is the same in all processes that call it so, and what disturbs a while disturbs all.

    Args:
        ways: by name.
        repetitions: how many count.
        seed: of the orders.
        warm_up: how many rounds go before and do not count.
        says: what standard error is told at each repetition; "" is nothing.
    """
    results: dict[Name, list[Result]] = {name: [] for name in ways}
    for repetition in range(-warm_up, repetitions):
        if says and repetition >= 0:
            progress(f"{says}: repetition {repetition + 1}/{repetitions}")
        for name in random.Random(f"{seed} {repetition}").sample(list(ways), len(ways)):
            result = ways[name]()
            if repetition >= 0:
                results[name].append(result)
    return results


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the columns that say how long repetitions took."""
    q1, middle, q3 = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return {"median_s": middle, "q1_s": q1, "q3_s": q3, "least_s": min(seconds)}


def busy_share(window_seconds: float = 0.5) -> float:
    """Return the share of all cores' time in which they were not idle."""

    def read() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and idle while a disk works

    total, idle = read()
    time.sleep(window_seconds)
    total_now, idle_now = read()
    return 1 - (idle_now - idle) / max(total_now - total, 1)


def check_load(force: bool) -> str:
    """Wait until the machine is quiet; return its load in words.

    Ends the program where others go on using the machine.
    """
    name, until = Path(sys.argv[0]).stem, time.monotonic() + PATIENCE_SECONDS
    while True:
        load, busy = os.getloadavg()[0], busy_share()
        text = f"{load:.2f} in the last minute, {100 * busy:.0f} % of the cores in use"
        if force or (load <= MAX_LOAD and busy <= MAX_BUSY):
            return text
        if time.monotonic() > until:
            sys.exit(
                f"{name}: the load ({text}) would spoil the times; wait until it is below "
                f"{MAX_LOAD} and {100 * MAX_BUSY:.0f} %, or pass --force"
            )
        progress(f"{name}: waits for a quiet machine; the load is {text}")
        time.sleep(min(20, PATIENCE_SECONDS))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
