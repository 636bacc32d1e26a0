"""Joins the traces of all ranks: one file for a viewer, a picture of a step, and the exposed share.

    torchrun ... -m megatron_burst.pretrain_gpt --burst-trace DIR ...
    python -m megatron_burst.tools.trace DIR

writes DIR/trace.json for chrome://tracing or ui.perfetto.dev, the pictures DIR/timeline.svg and
DIR/timeline.png, and DIR/exposed.json with the table that is printed: how much of attention's time
was waiting, and how much its plans have (see `exposure`). The clocks of several nodes are taken as
they are.

Ends with status 1 when a trace does not show the tiles and messages of its plan.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_burst.plans.plan import Channel
from megatron_burst.tools.exposure import (
    CallTrace,
    Exposure,
    calls_of,
    exposures,
    load,
    quickest,
)
from megatron_burst.tools.extras import extra
from megatron_burst.transport.chrome_trace import TraceError, file_of

with extra("plot", __name__):
    from megatron_burst.tools.timeline_figure import MOST_RANKS, draw_timeline


def join(directory: Path, ranks: int) -> Path:
    """Write the events of all ranks, by one clock, into one file; return it."""
    contents = [json.loads(file_of(directory, rank).read_text()) for rank in range(ranks)]
    starts = [content["otherData"]["started_at_ns"] for content in contents]
    events: list[dict[str, Any]] = []
    for content, start in zip(contents, starts, strict=True):
        later = (start - min(starts)) / 1e3
        for event in content["traceEvents"]:
            moved = {"ts": round(event["ts"] + later, 3)} if "ts" in event else {}
            events.append({**event, **moved})
    path = directory / "trace.json"
    joined = {"traceEvents": events, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(joined, separators=(",", ":")))
    return path


def summary(
    directory: Path, seconds_a_byte: dict[str, float] | None = None
) -> tuple[dict[str, Any], list[CallTrace]]:
    """Return what the traces in `directory` amount to, as it is written to JSON, and their calls.

    Raises:
        TraceError: they are not all there.
    """
    traces = load(directory)
    calls = calls_of(traces)
    if not calls:
        raise TraceError(f"{directory}: nothing was recorded; did the run reach its second step?")
    rows = exposures(calls, seconds_a_byte)
    content = {
        "ranks": len(traces),
        "clock": traces[0].clock,
        "training_steps": sorted({c.call.arguments["training_step"] for c in calls}),
        "rows": [
            asdict(row) | {"share": row.share, "predicted_share": row.predicted_share}
            for row in rows
        ],
        "share_by_rank": _by_rank(calls),
        "seconds_a_byte": seconds_a_byte or quickest(calls),
        "miscounts": [text for call in calls for text in call.miscounts],
    }
    return content, calls


def _by_rank(calls: Sequence[CallTrace]) -> dict[int, float]:
    found = {}
    for rank in sorted({call.rank for call in calls}):
        ours = [call for call in calls if call.rank == rank]
        found[rank] = sum(c.waiting for c in ours) / sum(c.call.seconds for c in ours)
    return found


def _table(content: dict[str, Any]) -> Table:
    steps, ranks = len(content["training_steps"]), content["ranks"]
    table = Table(title=f"a training step and rank, mean of {steps} steps and {ranks} ranks")
    table.add_column("")
    for name in ("calls", "tiles", "sent", "MiB", "ms", "waiting", "peer late", "exposed", "plan"):
        table.add_column(name, justify="right")
    share = 1 / (steps * ranks)
    for written in content["rows"]:
        row = Exposure(**{name: written[name] for name in Exposure.__slots__})
        table.add_row(
            row.name,
            *(f"{count * share:g}" for count in (row.calls, row.tiles, row.messages)),
            f"{row.bytes * share / 2**20:.2f}",
            *(f"{seconds * share * 1e3:.2f}" for seconds in (row.seconds, row.waiting, row.late)),
            f"{row.share:.1%}",
            f"{row.predicted_share:.1%}",
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_burst.tools.trace", description=__doc__.split("\n")[0]
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="that of --burst-trace")
    parser.add_argument(
        "--step", type=int, metavar="N", help="the training step to draw (default: the last)"
    )
    parser.add_argument(
        "--link-gbit",
        type=float,
        nargs=2,
        metavar=("WITHIN", "BETWEEN"),
        help="predict with these links, in Gbit/s a rank within and between nodes (default: the "
        "quickest message of each channel in the trace)",
    )
    return parser


def _links(gbit: Sequence[float] | None) -> dict[str, float] | None:
    if gbit is None:
        return None
    within, between = (8 / (rate * 1e9) for rate in gbit)
    outer = (Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN)
    return {str(channel): between if channel in outer else within for channel in Channel}


def _run(args: argparse.Namespace, console: Console) -> list[str]:
    content, calls = summary(args.directory, _links(args.link_gbit))
    step = args.step or content["training_steps"][-1]
    if step not in content["training_steps"]:
        raise TraceError(f"--step {step} was not traced; there are: {content['training_steps']}")
    if content["miscounts"]:
        return content["miscounts"]
    joined = join(args.directory, content["ranks"])
    (args.directory / "exposed.json").write_text(json.dumps(content, indent=2) + "\n")
    for suffix in (".svg", ".png"):
        draw_timeline(calls, step, args.directory / f"timeline{suffix}")
    console.print(_table(content))
    worst = max(content["share_by_rank"], key=content["share_by_rank"].__getitem__)
    console.print(
        f"rank {worst} waits most: {content['share_by_rank'][worst]:.1%} of its attention time"
    )
    if content["ranks"] > MOST_RANKS:
        console.print(f"the picture shows {MOST_RANKS} ranks of the first rank's ring at most")
    console.print(f"for chrome://tracing or ui.perfetto.dev: {joined}")
    console.print(f"pictures of step {step}: {args.directory / 'timeline.svg'} and .png")
    return []


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        # Wide enough for the table, which a narrow terminal may wrap: no number may be cut.
        problems = _run(args, Console(highlight=False, markup=False, width=120))
    except (TraceError, OSError) as error:
        problems = [str(error)]
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for problem in problems:
        errors.print(f"trace: {problem}", style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
