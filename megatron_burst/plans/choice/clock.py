"""When ranks that carry out plans are done, given how long computing and messages take.

All ranks begin together. Both ends post a message at the start of one step, so all that is posted
before a step is known when it starts: no events are needed. A message starts when both ends have
posted it and what its sender posted before on that network is through. What a sender posts in one
step shares the network, as TCP's connections and NCCL's communicators do: it is through together.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.schedules.schedule import Loads

type _Seconds = NDArray[np.float64]


class Timed(NamedTuple):
    """Messages with the time that they take: arrays [leg, message]."""

    loads: Loads
    between: NDArray[np.bool]  # whether they go to another node, over other links
    seconds: _Seconds

    def mark(self, acts: NDArray[np.bool]) -> None:
        """Set where a rank sends: [step, rank]."""
        leg, message = self.loads.sizes.nonzero()
        acts[self.loads.leaves[leg], self.loads.sources[leg, message]] = True


def duration(messages: Iterable[Timed], computing: _Seconds) -> float:
    """Return the seconds until the last rank has computed and has all that it waits for.

    `computing` are the seconds that a rank computes in a step, [step, rank], of all steps.
    """
    ranks = computing.shape[1]
    now, free = np.zeros(ranks), np.zeros((2, ranks))
    posted: dict[int, list[tuple[Timed, int]]] = defaultdict(list)
    for timed in messages:
        for leg, step in enumerate(timed.loads.leaves.tolist()):
            posted[step].append((timed, leg))
    landing: dict[int, list[tuple[NDArray[np.int64], _Seconds]]] = defaultdict(list)
    for step, of_ranks in enumerate(computing):
        sent = []  # in this step: until all of it is known, nothing of it is through
        for timed, leg in posted[step]:
            goes = timed.loads.sizes[leg] > 0
            source, target = timed.loads.sources[leg, goes], timed.loads.targets[leg, goes]
            link = timed.between[leg, goes].astype(int), source
            start = np.maximum(np.maximum(now[source], now[target]), free[link])
            free[link] = start + timed.seconds[leg, goes]
            sent.append((int(timed.loads.lands[leg]), link, (source, target)))
        for lands, link, ends in sent:
            landing[lands] += [(end, free[link]) for end in ends]
        now += of_ranks
        for rank, arrival in landing.pop(step, ()):
            now[rank] = np.maximum(now[rank], arrival)
    return float(now.max())
