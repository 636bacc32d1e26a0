"""What two nodes are measured in, what is expected of the times, and ratios of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from algorithms import BASELINE, PHASES, SETTINGS, Place, Sizes, heads_fit, is_itself

type Seconds = tuple[float, float, float]  # of each of PHASES
type Times = Mapping[str, Sequence[Sequence[Seconds]]]  # by what ran, launch and repetition


def kernels_of(name: str) -> str:
    """What an algorithm's kernel calls alone are called among the times."""
    return f"kernels of {name}"


class Ratio(NamedTuple):
    """One algorithm's time over the least of others', and what it shall be at most."""

    phase: str
    over: str
    under: tuple[str, ...] = (BASELINE,)
    limit: float | None = None

    def __str__(self) -> str:
        names = ", ".join(self.under)
        return f"{self.phase}: {self.over} / {names if len(self.under) == 1 else f'min({names})'}"

    def of_launches(self, times: Times) -> list[float]:
        """Return, for each launch, the ratio of the medians over its repetitions."""
        over, *under = (medians(times[name], self.phase) for name in (self.over, *self.under))
        return [a / min(others) for a, *others in zip(over, *under, strict=True)]


@dataclass(frozen=True, slots=True)
class Situation:
    """What is attended to, over what links, and what is expected of it."""

    mbit: float  # inf: without a limit; 0: plain loopback
    sizes: Sizes
    targets: tuple[Ratio, ...] = field(default=(), compare=False)
    auto_backward: str = field(default="", compare=False)  # what `burst auto` has to choose

    def __str__(self) -> str:
        return f"{rate_name(self.mbit)}, {self.sizes}"

    def place(self, nodes: int, ranks_per_node: int) -> Place:
        """Return where the ranks are: on plain loopback all on one node."""
        ranks = nodes * ranks_per_node
        return Place(ranks, ranks_per_node if self.mbit else ranks)

    def algorithms(self, place: Place) -> list[str]:
        """Return what can run, and is not the same as another."""
        heads = self.sizes.heads, self.sizes.kv_heads
        names = [name for name in SETTINGS if is_itself(name, place)]
        return [name for name in names if heads_fit(name, *heads, place)]


def rate_name(mbit: float) -> str:
    if mbit:
        return "no limit" if math.isinf(mbit) else f"{mbit:g} Mbit/s"
    return "plain loopback, one node"


MHA = (
    Ratio("forward", "ring double", limit=0.55),
    Ratio("backward", "ring double", limit=0.66),
    Ratio("backward", "burst query flat", limit=0.88),
    Ratio("step", "burst auto", limit=0.52),
)
GQA = (Ratio("step", "burst auto", (BASELINE, "ring double"), limit=1.05),)
RATES = (200, 400, 800, 2000, math.inf)
SHORT, GROUPED, LONG = (
    Sizes(*numbers) for numbers in ((512, 8, 8, 64), (512, 8, 2, 64), (1024, 8, 8, 64))
)
SUITE = (
    *(Situation(mbit, SHORT, MHA if mbit == 400 else ()) for mbit in RATES),
    *(Situation(mbit, GROUPED, GQA if mbit == 400 else (), "kv") for mbit in RATES),
    Situation(2000, LONG, (Ratio("step", "burst auto", limit=1.05),)),
    Situation(0, LONG, (Ratio("step", "burst auto", (kernels_of("burst auto"),), limit=1.20),)),
)


def slowest(ranks: Sequence[Sequence[tuple[float, float]]]) -> list[Seconds]:
    maxima = [tuple(map(max, zip(*r, strict=True))) for r in zip(*ranks, strict=True)]
    return [(forward, backward, forward + backward) for forward, backward in maxima]


def column(repetitions: Sequence[Seconds], phase: str) -> list[float]:
    return [seconds[PHASES.index(phase)] for seconds in repetitions]


def medians(launches: Sequence[Sequence[Seconds]], phase: str) -> list[float]:
    return [median(column(repetitions, phase)) for repetitions in launches]


def kernels_share(times: Times, name: str, phase: str) -> float:
    """Return how much of an algorithm's time its kernel calls take where they run alone."""
    return median(Ratio(phase, kernels_of(name), (name,)).of_launches(times))
