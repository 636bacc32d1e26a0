"""When ranks that carry out plans are done, given how long computing and messages take.

It knows nothing of attention: a rank is a list of steps. All ranks begin together. A message starts
when both of its ends have posted it and what its sender posted before on that channel is through.
"""

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One end's view of a message; those of one channel between two ranks stay in order."""

    source: int
    target: int
    channel: str
    lands: int
    """The step of this end that waits for it."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank posts together, and how long it then computes."""

    seconds: float
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()


type _Key = tuple[int, int, str, int]  # source, target, channel, which of them


def duration(ranks: Mapping[int, Sequence[Step]]) -> float:
    """Return the seconds until the last rank has computed and has all that it waits for.

    Raises:
        ValueError: the ranks wait for each other for ever, or for a message that nobody sends.
    """
    links, end = _Links(), 0.0
    running = {rank: _run(steps, links) for rank, steps in ranks.items()}
    while running:
        before = len(running), len(links.arrivals)
        for rank, run in list(running.items()):
            try:
                next(run)
            except StopIteration as done:
                end = max(end, done.value)
                del running[rank]
        links.move()
        if before == (len(running), len(links.arrivals)):
            raise ValueError(f"ranks {', '.join(map(str, running))} wait for ever")
    return end


def _run(steps: Sequence[Step], links: "_Links") -> Generator[None, None, float]:
    """Go through one rank's steps, stopping for as long as an arrival is not known."""
    now = 0.0
    waits: dict[int, list[_Key]] = defaultdict(list)
    for number, step in enumerate(steps):
        for end, messages in (("receive", step.receives), ("send", step.sends)):
            for message in messages:
                waits[message.lands].append(links.post(end, message, now))
        while not all(key in links.arrivals for key in waits[number]):
            yield
        now = max(now + step.seconds, *(links.arrivals[key] for key in waits[number]), 0.0)
    return now


class _Links:
    """When messages arrive, as far as it is known."""

    def __init__(self) -> None:
        self._count: dict[tuple[object, ...], int] = defaultdict(int)
        self._posted: dict[_Key, list[float]] = defaultdict(list)
        self._queues: dict[tuple[int, str], deque[tuple[_Key, float]]] = defaultdict(deque)
        self._free: dict[tuple[int, str], float] = defaultdict(float)
        self.arrivals: dict[_Key, float] = {}

    def post(self, end: str, message: Message, now: float) -> _Key:
        """Note that one end has posted a message; return what it is known by."""
        link = message.source, message.target, message.channel
        key = (*link, self._count[end, *link])
        self._count[end, *link] += 1
        self._posted[key].append(now)
        if end == "send":
            self._queues[message.source, message.channel].append((key, message.seconds))
        return key

    def move(self) -> None:
        """Let every message through whose both ends are there and whose turn it is."""
        for sender, queue in self._queues.items():
            while queue and len(self._posted[queue[0][0]]) == 2:
                key, seconds = queue.popleft()
                start = max(*self._posted[key], self._free[sender])
                self.arrivals[key] = self._free[sender] = start + seconds
