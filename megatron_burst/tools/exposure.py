"""How much of attention's time is spent waiting for messages: measured, and as its plans have it.

The prediction carries the plans out on ranks that begin every call together: a tile takes the mean
time of those with as many pairs, a message as long for a byte as the quickest of its channel (or
what is given), everything else its mean. What is measured beyond it is ranks that come late,
unequal times of equal work, and messages that are slower than the quickest. Of the waiting the part
is told apart in which a peer had not yet come to its end of a message; between nodes that is as
exact as their clocks.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron_burst.plans.timeline import Message, Step, timeline
from megatron_burst.transport.chrome_trace import (
    CALL,
    RECEIVE,
    SEND,
    Event,
    RankTrace,
    TraceError,
    file_of,
    read,
)
from megatron_burst.transport.trace import Activity


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One rank's part in a call: what it did, by kind."""

    rank: int
    call: Event
    events: Mapping[str, Sequence[Event]]

    @property
    def name(self) -> str:
        """Which it is: forward, backward or head exchange."""
        return self.call.name

    @property
    def plan_rank(self) -> int:
        """The rank's number in the plan."""
        return int(self.call.arguments["plan_rank"])

    @property
    def waiting(self) -> float:
        """Seconds for which it did nothing."""
        return sum(event.seconds for event in self.events[Activity.WAIT])

    @property
    def miscounts(self) -> list[str]:
        """Where what was recorded is not what was planned."""
        counted = {
            "tiles": len(self.events[Activity.TILE]),
            "sends": len(self.events[SEND]),
            "receives": len(self.events[RECEIVE]),
        }
        planned = self.call.arguments
        where = f"rank {self.rank}, call {planned['call']} ({self.name})"
        return [
            f"{where}: {count} {what}, planned {planned[what]}"
            for what, count in counted.items()
            if count != planned[what]
        ]


@dataclass(frozen=True, slots=True)
class Exposure:
    """Waiting and attention time of the calls of one name, summed over calls and ranks."""

    name: str
    calls: int
    tiles: int
    messages: int
    bytes: int
    seconds: float
    waiting: float
    late: float
    """Of the waiting, until the last peer had posted its end of the messages."""
    predicted_seconds: float
    predicted_waiting: float

    @property
    def share(self) -> float:
        """The measured share of waiting."""
        return self.waiting / self.seconds if self.seconds else 0.0

    @property
    def predicted_share(self) -> float:
        """The share of waiting by the plans."""
        return self.predicted_waiting / self.predicted_seconds if self.predicted_seconds else 0.0


def load(directory: Path) -> list[RankTrace]:
    """Read the files of all ranks of one run, in order.

    Raises:
        TraceError: there are none, some are missing, or they are of several runs.
    """
    found = sorted(directory.glob(file_of(directory, 0).name.replace("00000", "*")))
    if not found:
        raise TraceError(f"{directory} has no trace: train with --burst-trace {directory}")
    traces = [read(file) for file in found]
    ranks = traces[0].ranks
    if [trace.rank for trace in traces] != list(range(ranks)):
        given = ", ".join(str(trace.rank) for trace in traces)
        raise TraceError(
            f"{directory} has traces of the ranks {given}, but that run had {ranks} ranks: a rank "
            "did not end, or the files are of several runs; empty the directory and train again"
        )
    return traces


def calls_of(traces: Iterable[RankTrace]) -> list[CallTrace]:
    """Return every rank's part in every call."""
    found = []
    for trace in traces:
        events: dict[int, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for event in trace.events:
            events[event.arguments["call"]][event.kind].append(event)
        found += [CallTrace(trace.rank, parts[CALL][0], parts) for parts in events.values()]
    return found


def exposures(
    calls: Sequence[CallTrace], seconds_a_byte: Mapping[str, float] | None = None
) -> list[Exposure]:
    """Return the exposure of each name of calls, and last of all together.

    Args:
        calls: of all ranks.
        seconds_a_byte: of the channels; None takes those of `quickest`.
    """
    joined = list(_joined(calls))
    predicted = _predicted(joined, seconds_a_byte or quickest(calls))
    late = {id(call): seconds for together in joined for call, seconds in _late(together)}
    named = {name: [c for c in calls if c.name == name] for name in sorted({c.name for c in calls})}
    return [
        Exposure(
            name=name,
            calls=len(ours),
            tiles=sum(len(call.events[Activity.TILE]) for call in ours),
            messages=sum(len(call.events[SEND]) for call in ours),
            bytes=sum(event.arguments["bytes"] for call in ours for event in call.events[SEND]),
            seconds=sum(call.call.seconds for call in ours),
            waiting=sum(call.waiting for call in ours),
            late=sum(late[id(call)] for call in ours),
            predicted_seconds=sum(predicted[id(call)][0] for call in ours),
            predicted_waiting=sum(predicted[id(call)][1] for call in ours),
        )
        for name, ours in {**named, "attention": calls}.items()
    ]


def quickest(calls: Iterable[CallTrace]) -> dict[str, float]:
    """Return for each channel the least seconds that a byte of any message took.

    From posting until the wait for it ended: of messages that had arrived long before they were
    waited for, this is more than they took.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        for event in call.events[RECEIVE]:
            times[event.arguments["channel"]].append(event.seconds / event.arguments["bytes"])
    return {channel: min(all_times) for channel, all_times in times.items()}


def _predicted(
    joined: Sequence[Sequence[CallTrace]], seconds_a_byte: Mapping[str, float]
) -> dict[int, tuple[float, float]]:
    """Return the seconds and the waiting of each rank's part in each call, by its identity."""
    calls = [call for together in joined for call in together]
    seconds_of = _mean_times(calls)
    rest = _means((call.name, _rest(call)) for call in calls)
    found = {}
    for together in joined:
        steps = {c.plan_rank: list(_steps(c, seconds_of, seconds_a_byte)) for c in together}
        times = timeline(steps)
        for call in together:
            of_rank = times[call.plan_rank]
            total = (of_rank[-1].landed if of_rank else 0.0) + rest[call.name]
            found[id(call)] = total, sum(step.waiting for step in of_rank)
    return found


def _late(together: Sequence[CallTrace]) -> Iterator[tuple[CallTrace, float]]:
    """For each rank's part in a call: how long it waited for peers that had not posted yet."""
    posted: dict[tuple[str, object], list[float]] = defaultdict(list)
    for call in together:
        for kind in (SEND, RECEIVE):
            for event in call.events[kind]:
                posted[kind, _link(call, event)].append(event.start)
    for call in together:
        number: Counter[object] = Counter()
        peers_came: dict[int, float] = defaultdict(float)
        for kind, other in ((SEND, RECEIVE), (RECEIVE, SEND)):
            for event in call.events[kind]:
                link, lands = _link(call, event), event.arguments["lands"]
                came = posted[other, link][number[kind, link]]
                number[kind, link] += 1
                peers_came[lands] = max(peers_came[lands], came)
        waits = call.events[Activity.WAIT]
        until = [min(peers_came[w.arguments["step"]], w.stop) for w in waits]
        yield call, sum(max(0.0, end - w.start) for w, end in zip(waits, until, strict=True))


def _link(call: CallTrace, event: Event) -> tuple[int, int, str]:
    """From whom to whom a message goes, and on which channel: there they stay in order."""
    ends = (call.plan_rank, event.arguments["peer"])
    source, target = ends if event.kind == SEND else ends[::-1]
    return source, target, event.arguments["channel"]


def _joined(calls: Iterable[CallTrace]) -> Iterator[list[CallTrace]]:
    """Put the parts of the ranks of a call together: each rank makes its calls in one order."""
    seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
    joined: dict[tuple[tuple[int, ...], int], list[CallTrace]] = defaultdict(list)
    for call in calls:
        ranks = tuple(call.call.arguments["ranks"])
        joined[ranks, seen[call.rank, ranks]].append(call)
        seen[call.rank, ranks] += 1
    for (ranks, _), parts in joined.items():
        if len(parts) != len(ranks):
            raise TraceError(f"of a call of the ranks {ranks} there are only {len(parts)} parts")
    yield from joined.values()


def _steps(
    call: CallTrace, seconds_of: Callable[[CallTrace, Event], float], a_byte: Mapping[str, float]
) -> Iterator[Step]:
    seconds = [0.0] * call.call.arguments["steps"]
    for kind in (Activity.POST, Activity.TILE, Activity.SUM):
        for event in call.events[kind]:
            seconds[event.arguments["step"]] += seconds_of(call, event)
    messages: dict[tuple[str, int], list[Message]] = defaultdict(list)
    for direction in (SEND, RECEIVE):
        for event in call.events[direction]:
            link, about = _link(call, event), event.arguments
            taking = about["bytes"] * a_byte[about["channel"]]
            message = Message(*link, about["lands"], taking)
            messages[direction, about["step"]].append(message)
    for number, computing in enumerate(seconds):
        yield Step(computing, messages[SEND, number], messages[RECEIVE, number])


def _mean_times(calls: Iterable[CallTrace]) -> Callable[[CallTrace, Event], float]:
    """Return how long what is like an event takes on average over all calls and ranks."""

    def kind_of(call: CallTrace, event: Event) -> tuple[object, ...]:
        return call.name, event.kind, event.arguments.get("pairs")

    means = _means(
        (kind_of(call, event), event.seconds)
        for call in calls
        for kind in (Activity.POST, Activity.TILE, Activity.SUM)
        for event in call.events[kind]
    )
    return lambda call, event: means[kind_of(call, event)]


def _rest(call: CallTrace) -> float:
    """The seconds of a call that are none of its activities."""
    return call.call.seconds - sum(e.seconds for kind in Activity for e in call.events[kind])


def _means[K](items: Iterable[tuple[K, float]]) -> dict[K, float]:
    values: dict[K, list[float]] = defaultdict(list)
    for key, value in items:
        values[key].append(value)
    return {key: fmean(found) for key, found in values.items()}
