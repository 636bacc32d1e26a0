"""When ranks that carry out plans compute and wait, given how long computing and messages take.

It knows nothing of attention: a rank is a list of steps. All ranks begin together. A message starts
when both of its ends have posted it and what its sender posted before on that channel is through.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Times:
    """When a step of a rank begins, has computed and has all that lands in it, in seconds."""

    start: float
    computed: float
    landed: float

    @property
    def waiting(self) -> float:
        """How long the rank does nothing."""
        return self.landed - self.computed


def timeline(ranks: Mapping[int, Sequence[Step]]) -> dict[int, list[Times]]:
    """Return the times of every step of every rank.

    Raises:
        ValueError: the ranks wait for each other for ever, or for a message that nobody sends.
    """
    running = {rank: _Rank(rank, steps) for rank, steps in ranks.items()}
    links = _Links()
    while any(rank.is_running for rank in running.values()):
        if not any([rank.go_on(links) for rank in running.values()]):
            stuck = {r.number: len(r.times) for r in running.values() if r.is_running}
            raise ValueError(f"these ranks never get beyond the step named: {stuck}")
    return {number: rank.times for number, rank in running.items()}


type _Key = tuple[int, int, str, int]  # source, target, channel, which of them


class _Links:
    """When messages arrive, as far as it is known."""

    def __init__(self) -> None:
        self._count: dict[tuple[object, ...], int] = defaultdict(int)
        self._posted: dict[_Key, list[float]] = defaultdict(list)
        self._queues: dict[tuple[int, str], list[tuple[_Key, float]]] = defaultdict(list)
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
                key, seconds = queue.pop(0)
                start = max(*self._posted[key], self._free[sender])
                self.arrivals[key] = self._free[sender] = start + seconds


class _Rank:
    """How far one rank has come."""

    def __init__(self, number: int, steps: Sequence[Step]) -> None:
        self.number, self._steps = number, steps
        self.times: list[Times] = []
        self._waits: dict[int, list[_Key]] = defaultdict(list)
        self._begun: tuple[float, float] | None = None  # the step's start and computed

    @property
    def is_running(self) -> bool:
        return len(self.times) < len(self._steps)

    def go_on(self, links: _Links) -> bool:
        """Go as far as known arrivals allow; return whether that is any further."""
        moved = False
        while self.is_running:
            if self._begun is None:
                self._begin(links)
                moved = True
            links.move()
            assert self._begun is not None
            number, (start, computed) = len(self.times), self._begun
            keys = self._waits[number]
            if not all(key in links.arrivals for key in keys):
                break
            landed = max([computed, *(links.arrivals[key] for key in keys)])
            self.times.append(Times(start, computed, landed))
            self._begun, moved = None, True
        return moved

    def _begin(self, links: _Links) -> None:
        now = self.times[-1].landed if self.times else 0.0
        step = self._steps[len(self.times)]
        for end, messages in (("receive", step.receives), ("send", step.sends)):
            for message in messages:
                self._waits[message.lands].append(links.post(end, message, now))
        self._begun = now, now + step.seconds
