"""How much of attention's communication its computation hides, from torch.profiler's files.

    torchrun ... -m megatron_burst.pretrain_gpt ... --tensorboard-dir RUN/tensorboard \\
        --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4
    megatron-burst trace RUN/torch_profile

prints a table by rank and pass, and writes DIR/trace.json for ui.perfetto.dev: attention and NCCL
of all ranks. The files of single ranks, which show everything else, open there, too.

On GPUs communication is NCCL's kernels that attention has started; it is exposed while no other
kernel runs beside them. On the CPU it lasts from posting until the wait for it has ended, and the
wait is exposed.
"""

import gzip
import json
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_burst.tools import terminal
from megatron_burst.tools.options import Parser, add_json
from megatron_burst.transport.profiling import PREFIX

ATTENTION = "attention"
"""The pass of the rows that sum up all others."""
_MOST_RANKS = 16  # in the printed table
_RANGE = re.compile(
    PREFIX
    + r"(forward|backward|head exchange)(?: step (\d+): (\w+) ?(?:for step (\d+), (\d+) bytes)?)?"
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

type Span = tuple[float, float]
"""When something started and stopped, in microseconds."""


class TraceError(ValueError):
    """There is no trace of attention; the message says where and what to do."""


def summary(directory: Path) -> dict[str, Any]:
    """Return what the traces in `directory` amount to, as `--json` prints it.

    Its rows are of a rank and a pass, or all of a rank's, summed over calls: `seconds`, those of
    `communication` and its `exposed` ones, `share` of the time that is exposed, share of the
    communication that is `hidden`, and `bytes_sent`.

    Raises:
        TraceError: there is no trace, or no attention in it.
    """
    return _summary(_load(directory), directory)


def _summary(found: dict[int, dict[str, Any]], directory: Path) -> dict[str, Any]:
    rows = [row for rank, content in found.items() for row in _rows(rank, content["traceEvents"])]
    if not rows:
        raise TraceError(
            f"{directory}: no attention of ours ran in the profiled steps; see --profile-step-start"
        )
    names = {e.get("name") for content in found.values() for e in content["traceEvents"]}
    steps = sum(str(name).startswith("ProfilerStep#") for name in names)
    return {"ranks": sorted(found), "steps": steps or 1, "rows": rows}


def _join(found: dict[int, dict[str, Any]], path: Path) -> None:
    """Write attention's ranges and NCCL's kernels of all ranks into one file."""
    events: list[dict[str, Any]] = []
    for rank, content in found.items():
        later = content.get("baseTimeNanoseconds", 0) / 1e3
        named = {"name": "process_name", "ph": "M", "pid": rank}
        events.append(named | {"args": {"name": f"rank {rank}"}})
        for event in content["traceEvents"]:
            if _RANGE.match(str(event.get("name"))) or _is_nccl(event):
                events.append(event | {"pid": rank, "ts": event["ts"] + later})
    path.write_text(json.dumps({"traceEvents": events}))


def _folder(directory: Path) -> Path:
    below = directory / "torch_profile"  # where Megatron puts it, beside --tensorboard-dir
    return below if below.is_dir() else directory


def _load(directory: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sorted(_folder(directory).glob("rank-*.json*")):
        try:
            data = path.read_bytes()
            content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
            found[int(path.name.split(".")[0].removeprefix("rank-"))] = content
            content["traceEvents"]  # noqa: B018
        except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
            raise TraceError(f"{path} is no trace of torch.profiler: {error!r}") from error
    if not found:
        raise TraceError(
            f"{directory} has no rank-N.json.gz: train with --profile --use-pytorch-profiler "
            "--profile-step-start 2 --profile-step-end 4 --tensorboard-dir RUN/tensorboard"
        )
    return dict(sorted(found.items()))


def _rows(rank: int, events: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each pass, and one for all of them."""
    calls = list(_calls(events))
    for name in (*dict.fromkeys(call.name for call in calls), *([ATTENTION] if calls else ())):
        ours = [call for call in calls if name in (call.name, ATTENTION)]
        seconds = sum(call.window[1] - call.window[0] for call in ours) / 1e6
        communication = sum(_length(call.communication) for call in ours) / 1e6
        exposed = sum(call.exposed for call in ours) / 1e6
        yield {
            "rank": rank,
            "name": name,
            "calls": len(ours),
            "seconds": seconds,
            "communication": communication,
            "exposed": exposed,
            "share": exposed / seconds if seconds else 0.0,
            "hidden": 1 - exposed / communication if communication else 1.0,
            "bytes_sent": sum(call.bytes_sent for call in ours),
        }


@dataclass(frozen=True, slots=True)
class _Call:
    """One rank's part in a forward, backward or head exchange; times in microseconds."""

    name: str
    window: Span
    communication: Sequence[Span]
    exposed: float
    bytes_sent: int


def _calls(events: Sequence[dict[str, Any]]) -> Iterator[_Call]:
    """Read one rank's calls, from the device's kernels where there are any."""
    ranges = [
        (event, found)
        for event in events
        if event.get("cat") == "user_annotation" and (found := _RANGE.match(event["name"]))
    ]
    device = _Device(events)
    for call, name in ((event, found[1]) for event, found in ranges if found[2] is None):
        window = _span(call)
        parts = [
            (_span(event), found)
            for event, found in ranges
            if found[2] and event["tid"] == call["tid"] and window[0] <= event["ts"] <= window[1]
        ]
        posts = [(span[0], found) for span, found in parts if found[3] == "post"]
        waits = {found[2]: span for span, found in parts if found[3] == "wait"}
        spans = [(start, waits[found[4]][1]) for start, found in posts if found[4] in waits]
        exposed = _length(waits.values())
        if kernels := device.started_in(call):
            window = min(k["ts"] for k in kernels), max(_span(k)[1] for k in kernels)
            spans = [_span(kernel) for kernel in kernels if _is_nccl(kernel)]
            exposed = device.exposed(spans)
        yield _Call(name, window, spans, exposed, sum(int(found[5]) for _, found in posts))


class _Device:
    """The kernels of a rank, by when and in which thread the host has launched them."""

    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        launched = [event for event in events if "correlation" in event.get("args", {})]
        kernels = {e["args"]["correlation"]: e for e in launched if e["cat"] in _DEVICE}
        self._launches = sorted(
            (
                (e["ts"], e["tid"], kernels[e["args"]["correlation"]])
                for e in launched
                if e["cat"] not in _DEVICE and e["args"]["correlation"] in kernels
            ),
            key=itemgetter(0),
        )
        self._busy = _union(_span(kernel) for kernel in kernels.values() if not _is_nccl(kernel))

    def started_in(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the kernels that were launched during a range of the host."""
        start, stop = _span(call)
        first = bisect_left(self._launches, start, key=itemgetter(0))
        last = bisect_right(self._launches, stop, key=itemgetter(0))
        return [k for _, thread, k in self._launches[first:last] if thread == call["tid"]]

    def exposed(self, nccl: Sequence[Span]) -> float:
        """Return for how long these kernels run and none but NCCL's beside them."""
        alone = 0.0
        for start, stop in _union(nccl):
            first = bisect_right(self._busy, start, key=itemgetter(1))
            last = bisect_left(self._busy, stop, key=itemgetter(0))
            beside = [(max(a, start), min(b, stop)) for a, b in self._busy[first:last]]
            alone += stop - start - _length(beside)
        return alone


def _is_nccl(event: dict[str, Any]) -> bool:
    return event.get("cat") == "kernel" and event["name"].lower().startswith("nccl")


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in _union(spans))


def _table(content: dict[str, Any]) -> Table:
    steps = content["steps"]
    numbers = ("calls", "ms", "sent MiB", "communication ms", "exposed ms", "exposed", "hidden")
    title = f"attention in a training step, mean of {steps} steps"
    table = terminal.table(("rank", "pass"), numbers, title)
    for row in content["rows"]:
        if row["rank"] in content["ranks"][:_MOST_RANKS]:
            times = [row[name] * 1e3 / steps for name in ("seconds", "communication", "exposed")]
            sent, shares = row["bytes_sent"] / steps / 2**20, (row["share"], row["hidden"])
            first, *others = (f"{time:.2f}" for time in times)
            counts = f"{row['calls'] / steps:g}", first, f"{sent:.2f}"
            percents = (f"{share:.1%}" for share in shares)
            table.add_row(str(row["rank"]), row["name"], *counts, *others, *percents)
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status.

    Raises:
        TraceError: there is no trace, or no attention in it.
    """
    parser = Parser("trace", __doc__, "megatron-burst trace RUN/torch_profile")
    parser.add("directory", type=Path, metavar="DIR", help="with rank-N.json.gz")
    add_json(parser)
    args = parser.parse(sys.argv[1:] if argv is None else argv)
    found = _load(args.directory)
    content, joined = _summary(found, args.directory), _folder(args.directory) / "trace.json"
    _join(found, joined)
    if args.json:
        print(json.dumps(content, indent=2))
        return 0
    console = terminal.console()
    console.print(_table(content))
    whole = [row for row in content["rows"] if row["name"] == ATTENTION]
    worst = max(whole, key=itemgetter("share"))
    console.print(f"rank {worst['rank']} waits most: {worst['share']:.1%} of its attention time")
    if len(whole) > _MOST_RANKS:
        console.print(f"shown: {_MOST_RANKS} of {len(whole)} ranks; --json has all")
    console.print(f"for ui.perfetto.dev: {joined}")
    return 0
