"""When ranks that carry out plans are done, given how long computing and messages take.

All ranks begin together. Both ends post a message at the start of one step, so all that is posted
before a step is known when it starts: no events are needed. A message starts when both ends have
posted it and what its sender posted before on that network is through. What a sender posts in one
step shares the network, as TCP's connections and NCCL's communicators do: it is through together.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.schedule import Loads
from megatron_burst.plans.visibility.band import Bools, Ints

type _Seconds = NDArray[np.float64]


class _Leg(NamedTuple):
    """Messages that go together, each of another rank."""

    leaves: int  # steps
    lands: int
    sources: Ints
    targets: Ints
    links: Ints  # which of all ranks' two networks
    seconds: _Seconds


class Timed(NamedTuple):
    """Messages with the time that they take: arrays [leg, message]."""

    loads: Loads
    between: Bools  # whether they go to another node, over other links
    seconds: _Seconds

    def mark(self, acts: Bools) -> None:
        """Set where a rank sends: [step, rank]."""
        leg, message = self.loads.sizes.nonzero()
        acts[self.loads.leaves[leg], self.loads.sources[leg, message]] = True

    def legs(self, ranks: int) -> Iterator[_Leg]:
        """Return them, without those in which nothing goes."""
        sources, targets, sizes, leaves, lands = self.loads
        columns = sources, targets, self.between * ranks + sources, self.seconds
        goes = sizes > 0
        for leg, is_whole in enumerate(goes.all(axis=1).tolist()):
            of = slice(None) if is_whole else goes[leg]
            yield _Leg(int(leaves[leg]), int(lands[leg]), *(x[leg][of] for x in columns))


def duration(messages: Iterable[Timed], computing: _Seconds) -> float:
    """Return the seconds until the last rank has computed and has all that it waits for.

    `computing` are the seconds that a rank computes in a step, [step, rank], of all steps.
    """
    ranks = computing.shape[1]
    now, free = np.zeros(ranks), np.zeros(2 * ranks)
    posted: dict[int, list[_Leg]] = defaultdict(list)
    for timed in messages:
        for leg in timed.legs(ranks):
            posted[leg.leaves].append(leg)
    landing: dict[int, list[tuple[Ints, _Seconds]]] = defaultdict(list)
    for step, of_ranks in enumerate(computing):
        for leg in posted[step]:
            start = np.maximum(now[leg.sources], now[leg.targets])
            free[leg.links] = np.maximum(start, free[leg.links]) + leg.seconds
        for leg in posted[step]:  # until all of it is known, nothing of it is through
            through = free[leg.links]
            landing[leg.lands] += (leg.sources, through), (leg.targets, through)
        now += of_ranks
        for rank, arrival in landing.pop(step, ()):
            now[rank] = np.maximum(now[rank], arrival)
    return float(now.max())
