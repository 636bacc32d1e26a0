"""One rank's record of attention as a file that chrome://tracing and Perfetto open, and back.

A call and what it is made of lie on one line of the rank, messages on lines of their own. The
arguments of an event, which a viewer shows at a click, are all that is needed to read it back.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_burst.plans.plan import Plan, Receive, Send
from megatron_burst.transport.trace import Activity, Call, Recorder, Span

VERSION = 1
CALL = "call"
SEND, RECEIVE = "send", "receive"
LINE = 0  # of calls; messages are not on a line but in tracks that the viewer makes


class TraceError(ValueError):
    """A file is no trace of ours; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time; `kind` is CALL, an Activity, SEND or RECEIVE."""

    kind: str
    name: str
    start: float
    """Seconds since the epoch of the machine that recorded it."""
    seconds: float
    arguments: Mapping[str, Any]

    @property
    def stop(self) -> float:
        """When it ended."""
        return self.start + self.seconds


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank's file holds."""

    rank: int
    ranks: int
    """Of the job."""
    clock: str
    events: tuple[Event, ...]


def file_of(directory: Path, rank: int) -> Path:
    """Return where a rank's trace is written."""
    return directory / f"rank-{rank:05}.json"


def write(recorder: Recorder, directory: Path, rank: int, ranks: int) -> Path:
    """Write what was recorded on `rank` of a job of `ranks`; return the file."""
    recorder.clock.settle()
    directory.mkdir(parents=True, exist_ok=True)
    events = [_name_of_process(rank)]
    for number, call in enumerate(recorder.calls):
        events += _call_events(recorder, number, call, rank)
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "megatron_burst_trace": VERSION,
            "rank": rank,
            "ranks": ranks,
            "started_at_ns": recorder.started_at or 0,
            "clock": type(recorder.clock).__name__,
        },
    }
    file = file_of(directory, rank)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(content, separators=(",", ":")))
    os.replace(unfinished, file)  # a file that is there is whole
    return file


def read(file: Path) -> RankTrace:
    """Read back what `write` has written.

    Raises:
        TraceError: it is something else.
    """
    try:
        content = json.loads(file.read_text())
        about = content["otherData"]
        version = about["megatron_burst_trace"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TraceError(f"{file} is no trace of --burst-trace: {error!r}") from error
    if version != VERSION:
        raise TraceError(f"{file} has version {version} of the format, not {VERSION}")
    zero = about["started_at_ns"] / 1e9
    events = tuple(_events_of(content["traceEvents"], zero))
    return RankTrace(about["rank"], about["ranks"], about["clock"], events)


def _call_events(
    recorder: Recorder, number: int, call: Call, rank: int
) -> Iterator[dict[str, Any]]:
    def microseconds(mark: Any) -> float:
        return round(recorder.clock.seconds(mark) * 1e6, 3)

    def line(kind: str, name: str, marks: Call | Span, arguments: dict[str, Any]) -> dict[str, Any]:
        start, stop = microseconds(marks.start), microseconds(marks.stop)
        about = {"name": name, "cat": kind, "pid": rank, "tid": LINE}
        return {**about, "ph": "X", "ts": start, "dur": round(stop - start, 3), "args": arguments}

    yield line(CALL, call.name, call, {"call": number, **_about(call, rank)})
    landed = {s.plan_step: s.stop for s in call.spans if s.activity is Activity.WAIT}
    for index, span in enumerate(call.spans):
        arguments: dict[str, Any] = {"call": number, "step": span.plan_step}
        name = str(span.activity)
        if tile := span.tile:
            name = f"q{tile.query_owner} k{tile.key_owner}"
            arguments |= {"queries_of": tile.query_owner, "keys_of": tile.key_owner}
            arguments |= {"pairs": tile.pairs}
        yield line(span.activity, name, span, arguments)
        for place, (transfer, size) in enumerate(span.messages):
            stop = landed[transfer.lands]
            yield from _message(
                transfer, f"{rank}.{number}.{index}.{place}", rank,
                (microseconds(span.start), microseconds(stop)),
                {**arguments, "bytes": size, **_about_message(transfer, call)},
            )  # fmt: skip


def _message(
    transfer: Send | Receive,
    identity: str,
    rank: int,
    times: tuple[float, float],
    arguments: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """From the posting until the wait for it has ended: when it was on its way is not known."""
    kind = SEND if isinstance(transfer, Send) else RECEIVE
    about = {"name": str(transfer.item), "cat": kind, "id": identity, "pid": rank, "tid": LINE}
    yield {**about, "ph": "b", "ts": times[0], "args": arguments}
    yield {**about, "ph": "e", "ts": times[1]}


def _about(call: Call, rank: int) -> dict[str, Any]:
    plan: Plan = call.plan
    return {
        "training_step": call.training_step,
        "plan_rank": plan.rank,
        "ranks": list(call.ranks) or [rank],
        "steps": len(plan.steps),
        "tiles": len(plan.tiles),
        "sends": len(plan.sends),
        "receives": len(plan.receives),
    }


def _about_message(transfer: Send | Receive, call: Call) -> dict[str, Any]:
    return {
        "item": str(transfer.item.kind),
        "owner": transfer.item.owner,
        "peer": transfer.peer,
        "peer_of_job": call.ranks[transfer.peer],
        "channel": str(transfer.channel),
        "lands": transfer.lands,
    }


def _name_of_process(rank: int) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}


def _events_of(written: list[dict[str, Any]], zero: float) -> Iterator[Event]:
    begun: dict[str, dict[str, Any]] = {}
    for event in written:
        if event["ph"] == "X":
            start, seconds = zero + event["ts"] / 1e6, event["dur"] / 1e6
            yield Event(event["cat"], event["name"], start, seconds, event["args"])
        elif event["ph"] == "b":
            begun[event["id"]] = event
        elif event["ph"] == "e":
            first = begun.pop(event["id"])
            start, seconds = zero + first["ts"] / 1e6, (event["ts"] - first["ts"]) / 1e6
            yield Event(first["cat"], first["name"], start, seconds, first["args"])
