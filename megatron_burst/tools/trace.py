"""How much of attention's communication its computation hides, from torch.profiler's files.

    torchrun ... -m megatron_burst.pretrain ... --tensorboard-dir RUN/tensorboard \\
        --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4
    megatron-burst trace RUN/torch_profile

prints a table by rank and pass. Its two shares are not of the same whole:

    exposed   exposed milliseconds / milliseconds of attention: what attention would gain if all
              of its communication were hidden
    hidden    1 - exposed milliseconds / milliseconds of communication: which part of the
              communication costs nothing; "-" where nothing is sent

On GPUs communication is NCCL's kernels that attention has started; it is exposed while no other
kernel runs beside them. On the CPU it lasts from posting until the wait for it has ended, and the
wait is exposed. The files themselves, which show everything else, open in ui.perfetto.dev.
"""

import gzip
import json
import math
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron_burst.tools import terminal
from megatron_burst.tools.options import Parser
from megatron_burst.transport.range_names import PREFIX

ATTENTION = "attention"
"""The pass of the rows that sum up all others."""
_MOST_RANKS = 16  # in the printed table
_RANGE = re.compile(
    PREFIX
    + r"(forward|backward|head exchange|wait for the plan)"
    + r"(?: step (\d+): (\w+) ?(?:for step (\d+), (\d+) bytes)?)?"
)
_UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError),
    *(EOFError, OSError, zlib.error),
)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

type Event = dict[str, Any]
type Span = tuple[float, float]
"""When something started and stopped, in microseconds."""
type _Call = tuple[float, float, float, int]
"""Of one call: microseconds in all, of communication and exposed ones; bytes sent."""


def summary(directory: Path) -> dict[str, Any]:
    """Return what the traces in `directory` amount to, as `--json` prints it.

    Its rows are of a rank and a pass, or all of a rank's, summed over calls: `seconds`, those of
    `communication` and its `exposed` ones, `share` of the time that is exposed, share of the
    communication that is `hidden` (None where there is none), and `bytes_sent`.

    Raises:
        ValueError: there is no trace, or no attention in it.
    """
    by_rank: dict[int, list[dict[str, Any]]] = {}
    names: set[str] = set()
    below = directory / "torch_profile"  # where Megatron puts it
    for path in (below if below.is_dir() else directory).glob("rank-*.json*"):
        try:
            rank, events = int(path.name.split(".")[0].removeprefix("rank-")), _events(path)
            if rank in by_rank:
                raise TypeError("a second file of the rank")
            by_rank[rank] = [*_rows(rank, events)]
            names |= {str(event.get("name")) for event in events}
        except _UNREADABLE as error:
            raise ValueError(f"{path} is no trace of torch.profiler: {error!r}") from error
    if not by_rank:
        raise ValueError(
            f"{directory} has no rank-N.json.gz: train with --profile --use-pytorch-profiler "
            "--profile-step-start 2 --profile-step-end 4 --tensorboard-dir RUN/tensorboard"
        )
    if not any(by_rank.values()):
        raise ValueError(
            f"{directory}: no attention of ours ran in the profiled steps; see --profile-step-start"
        )
    steps = sum(name.startswith("ProfilerStep#") for name in names) or 1
    passes = [row for rank in sorted(by_rank) for row in by_rank[rank]]
    return {"ranks": sorted(by_rank), "steps": steps, "rows": passes}


def _events(path: Path) -> list[Event]:
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [{**event} for event in content["traceEvents"]]


def _rows(rank: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """A row for each pass, and one for all of them."""
    calls = list(_calls(events))
    for name in (*dict.fromkeys(name for name, _ in calls), *([ATTENTION] if calls else ())):
        ours = [call for its_name, call in calls if name in (its_name, ATTENTION)]
        *times, sent = map(sum, zip(*ours, strict=True))
        seconds, communication, exposed = (time / 1e6 for time in times)
        yield {
            "rank": rank,
            "name": name,
            "calls": len(ours),
            "seconds": seconds,
            "communication": communication,
            "exposed": exposed,
            "share": exposed / seconds if seconds else 0.0,
            "hidden": hidden(exposed, communication),
            "bytes_sent": sent,
        }


def hidden(exposed: float, communication: float) -> float | None:
    """Return which share of the communication is hidden; None where there is none."""
    return 1 - exposed / communication if communication else None


def _calls(events: Sequence[Event]) -> Iterator[tuple[str, _Call]]:
    """Read one rank's calls and their names, from the device's kernels where there are any."""
    named = (event for event in events if event.get("cat") == "user_annotation")
    ranges = [(event, match) for event in named if (match := _RANGE.match(event["name"]))]
    for event, _ in ranges:
        _span(event)  # that they are numbers, also where a call has none of them
    ranges.sort(key=lambda one: one[0]["ts"])
    known = [event for event in events if "correlation" in event.get("args", {})]
    kernels = {e["args"]["correlation"]: e for e in known if e["cat"] in _DEVICE}
    launches = [e for e in known if e["cat"] not in _DEVICE and e["args"]["correlation"] in kernels]
    launches.sort(key=itemgetter("ts"))
    starts = [event["ts"] for event, _ in ranges], [event["ts"] for event in launches]
    busy = _union(_span(kernel) for kernel in kernels.values() if not _is_nccl(kernel))
    for call, name in ((event, match[1]) for event, match in ranges if match[2] is None):
        window, tid = _span(call), call["tid"]
        near, began = (slice(bisect_left(x, window[0]), bisect_right(x, window[1])) for x in starts)
        parts = [(_span(e), match) for e, match in ranges[near] if match[2] and e["tid"] == tid]
        posts = [(span[0], match) for span, match in parts if match[3] == "post"]
        waits = {match[2]: span for span, match in parts if match[3] == "wait"}
        spans = [(posted, waits[match[4]][1]) for posted, match in posts if match[4] in waits]
        exposed = _length(waits.values())
        if ours := [kernels[e["args"]["correlation"]] for e in launches[began] if e["tid"] == tid]:
            window = min(k["ts"] for k in ours), max(_span(k)[1] for k in ours)
            spans = [_span(kernel) for kernel in ours if _is_nccl(kernel)]
            after = bisect_right(busy, window[0], key=itemgetter(1))
            beside = busy[after : bisect_left(busy, window[1], key=itemgetter(0))]
            exposed = _length([*spans, *beside]) - _length(beside)
        sent = sum(int(match[5]) for _, match in posts)
        yield name, (window[1] - window[0], _length(spans), exposed, sent)


def _is_nccl(event: Event) -> bool:
    return event.get("cat") == "kernel" and event["name"].lower().startswith("nccl")


def _span(event: Event) -> Span:
    start, length = event["ts"], event["dur"]
    if not (abs(start) < math.inf and 0 <= length < math.inf):
        raise ValueError(f"it starts at {start} and lasts {length} microseconds")
    return start, start + length


def _union(spans: Iterable[Span]) -> list[Span]:
    union: list[Span] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in _union(spans))


def parser() -> Parser:
    """Return what reads the words."""
    made = Parser("trace", __doc__, "megatron-burst trace RUN/torch_profile")
    made.add_argument("directory", type=Path, metavar="DIR", help="with rank-N.json.gz")
    return made


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    content = summary(args.directory)
    if args.json:
        print(json.dumps(content, indent=2))
        return 0
    steps, ranks = content["steps"], content["ranks"]
    columns: terminal.Columns = {
        "calls": ("calls", 1 / steps, "{:g}"),
        "ms": ("seconds", 1e3 / steps, "{:.2f}"),
        "communication ms": ("communication", 1e3 / steps, "{:.2f}"),
        "exposed ms": ("exposed", 1e3 / steps, "{:.2f}"),
        "sent MiB": ("bytes_sent", 2**-20 / steps, "{:.2f}"),
        "exposed, of ms": ("share", 1, "{:.1%}"),
        "hidden, of communication": ("hidden", 1, "{:.1%}"),
    }
    shown = [row for row in content["rows"] if row["rank"] in ranks[:_MOST_RANKS]]
    rows = [(str(row["rank"]), row["name"], *terminal.cells(row, columns)) for row in shown]
    table = terminal.table(("rank", "pass"), columns, rows)
    table.title = f"attention in a training step, mean of {steps} steps"
    terminal.console().print(table)
    if len(ranks) > _MOST_RANKS:
        print(f"shown: {_MOST_RANKS} of {len(ranks)} ranks; --json has all")
    return 0
