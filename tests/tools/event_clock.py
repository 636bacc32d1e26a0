"""When ranks that carry out plans are done, given how long computing and messages take.

All ranks begin together. A message starts when both of its ends have posted it and what its sender
posted before on that link is through. What it posts there in one step is through together.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence

from megatron_burst.plans.schedules.plan import Item, Plan, Step

type _Link = tuple[int, int, str]  # source, target, which network
type _Key = tuple[_Link, int]  # and which of the messages


def duration(
    plans: Sequence[Plan],
    computing: Callable[[int, Step], float],
    message: Callable[[Item, int, int], tuple[str, float]],
) -> float:
    """Return the seconds until the last rank has computed and has all that it waits for.

    Args:
        plans: of all ranks.
        computing: returns the seconds of a rank's step.
        message: returns the network and the seconds of an item from one rank to another.
    """
    links, end = _Links(message), 0.0
    running = {plan.rank: _run(plan, computing, links) for plan in plans}
    while running:
        before = len(running), len(links.arrivals)
        for rank, run in list(running.items()):
            try:
                next(run)
            except StopIteration as done:
                end = max(end, done.value)
                del running[rank]
        links.move()
        assert before != (len(running), len(links.arrivals)), f"{[*running]} wait for ever"
    return end


def _run(
    plan: Plan, computing: Callable[[int, Step], float], links: "_Links"
) -> Generator[None, None, float]:
    """Go through one rank's steps, stopping for as long as an arrival is not known."""
    now, rank = 0.0, plan.rank
    waits: dict[int, list[_Key]] = defaultdict(list)
    for number, step in enumerate(plan.steps):
        for r in step.receives:
            waits[r.lands].append(links.post(r.item, r.peer, rank, now, sends=False))
        for s in step.sends:
            waits[s.lands].append(links.post(s.item, rank, s.peer, now, sends=True))
        links.close(rank)
        while not all(key in links.arrivals for key in waits[number]):
            yield
        computed = now + computing(rank, step)
        now = max(computed, *(links.arrivals[key] for key in waits[number]), 0.0)
    return now


class _Links:
    """When messages arrive, as far as it is known; those of one link stay in order."""

    def __init__(self, message: Callable[[Item, int, int], tuple[str, float]]) -> None:
        self._message = message
        self._posted: dict[tuple[_Link, bool], list[float]] = defaultdict(list)  # when, by its end
        self._batches: dict[tuple[int, str], list[tuple[_Key, float]]] = defaultdict(list)
        self._queues: dict[tuple[int, str], deque[list[tuple[_Key, float]]]] = defaultdict(deque)
        self._free: dict[tuple[int, str], float] = defaultdict(float)
        self.arrivals: dict[_Key, float] = {}

    def post(self, item: Item, source: int, target: int, now: float, *, sends: bool) -> _Key:
        """Note that one end has posted a message; return what it is known by."""
        network, seconds = self._message(item, source, target)
        link = source, target, network
        posted = self._posted[link, sends]
        posted.append(now)
        key = link, len(posted) - 1
        if sends:
            self._batches[source, network].append((key, seconds))
        return key

    def close(self, source: int) -> None:
        """Note that a rank has posted all that it sends in a step."""
        for sender in [sender for sender in self._batches if sender[0] == source]:
            self._queues[sender].append(self._batches.pop(sender))

    def move(self) -> None:
        """Let every message through whose both ends are there and whose turn it is."""
        for sender, queue in self._queues.items():
            while queue and all(len(self._posted[link, False]) > n for (link, n), _ in queue[0]):
                batch = queue.popleft()
                for (link, number), seconds in batch:
                    posted = self._posted[link, True][number], self._posted[link, False][number]
                    self._free[sender] = max(*posted, self._free[sender]) + seconds
                self.arrivals |= dict.fromkeys((key for key, _ in batch), self._free[sender])
