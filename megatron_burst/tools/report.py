"""Compares training runs that should be equal: a table, a figure of the losses and a verdict.

    python -m megatron_burst.tools.report --corpus corpus.json \\
        --run "burst CP=4" TB_DIR --run "CP=1" TB_DIR --tokens-per-step 4096 --output DIR

Ends with status 1 when the losses of the first `--compare-steps` steps differ by more than
`--tolerance`, or when a run did not learn: its last losses are not 0.5 nat below the unigram
entropy of the corpus. Later steps are shown and not judged: training amplifies the last bit of a
float, and two right runs that round differently drift apart.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from megatron_burst.tools.extras import extra

with extra("train,plot", __name__):
    from megatron_burst.tools.figure import draw_losses
    from megatron_burst.tools.runlog import (
        BYTES_SENT,
        ITERATION_SECONDS,
        LOSS,
        RunLogError,
        Series,
        read_scalars,
    )

LAST = 10
"""How many of the last losses are averaged."""
WARM_UP = 5
"""How many of the first iteration times are left out, where twice as many exist."""
ENTROPY_MARGIN_NATS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one run amounts to; None where the run did not write the figure."""

    name: str
    steps: int
    first_loss: float
    last_loss: float
    mean_last_losses: float
    seconds_per_step: float | None
    tokens_per_second: float | None
    bytes_sent_per_rank_per_step: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest |a - b| / |b| of two runs' losses, nan if any is nan, and the step it is at."""

    runs: tuple[str, str]
    relative: float
    step: int


def summarize(name: str, scalars: dict[str, Series], tokens_per_step: int | None) -> Run:
    """The figures of one run; the time of a step is the median after warm-up."""
    losses = [loss for _, loss in _losses(name, scalars)]
    seconds = _after_warm_up(scalars.get(ITERATION_SECONDS, []))
    sent = [count for _, count in scalars.get(BYTES_SENT, [])]
    return Run(
        name=name,
        steps=len(losses),
        first_loss=losses[0],
        last_loss=losses[-1],
        mean_last_losses=fmean(losses[-LAST:]),
        seconds_per_step=seconds,
        tokens_per_second=tokens_per_step / seconds if tokens_per_step and seconds else None,
        bytes_sent_per_rank_per_step=fmean(sent) if sent else None,
    )


def largest_difference(losses: dict[str, Series], first: int | None = None) -> Difference | None:
    """The largest relative difference over the `first` steps (None: all) and all pairs of runs.

    None for a single run.

    Raises RunLogError when two runs did not log the same steps.
    """
    differences = []
    for one, other in combinations(losses, 2):
        steps = [step for step, _ in losses[one]]
        if steps != [step for step, _ in losses[other]]:
            raise RunLogError(
                f"{one!r} logged {len(steps)} steps, {other!r} logged {len(losses[other])}: "
                "runs can be compared only step by step"
            )
        for (step, a), (_, b) in zip(losses[one][:first], losses[other][:first], strict=True):
            relative = abs(a - b) / abs(b) if b else math.nan
            differences.append(Difference(runs=(one, other), relative=relative, step=step))
    return max(differences, key=_nan_is_largest, default=None)


def faults(
    runs: Sequence[Run], difference: Difference | None, tolerance: float, entropy: float | None
) -> list[str]:
    """Why these runs are not good, one sentence each; empty when they are."""
    found = []
    if difference is not None and not difference.relative <= tolerance:
        found.append(
            f"the losses of {difference.runs[0]} and {difference.runs[1]} differ by "
            f"{difference.relative:.2e} at step {difference.step}; --tolerance is {tolerance:.0e}"
        )
    for run in runs:
        if entropy is None:
            continue
        mark = entropy - ENTROPY_MARGIN_NATS
        if not run.mean_last_losses <= mark:
            found.append(
                f"{run.name} ends at a loss of {run.mean_last_losses:.3f}, not {mark:.3f} or less, "
                f"{ENTROPY_MARGIN_NATS} nat under the unigram entropy: train longer"
            )
    return found


def _losses(name: str, scalars: dict[str, Series]) -> Series:
    if not scalars.get(LOSS):
        raise RunLogError(f"{name}: the run logged no {LOSS!r}; it has {sorted(scalars)}")
    return scalars[LOSS]


def _after_warm_up(times: Series) -> float | None:
    seconds = [value for _, value in times]
    kept = seconds[WARM_UP:] if len(seconds) >= 2 * WARM_UP else seconds
    return median(kept) if kept else None


def _nan_is_largest(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative) else difference.relative


def _table(runs: Sequence[Run]) -> Table:
    table = Table("", *(run.name for run in runs))
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, list[str]] = {
        "steps": [str(run.steps) for run in runs],
        "first loss": [f"{run.first_loss:.5f}" for run in runs],
        "last loss": [f"{run.last_loss:.5f}" for run in runs],
        f"mean of last {LAST} losses": [f"{run.mean_last_losses:.5f}" for run in runs],
        "seconds per step": [_or_dash(run.seconds_per_step, "{:.3f}") for run in runs],
        "tokens per second": [_or_dash(run.tokens_per_second, "{:,.0f}") for run in runs],
        "bytes sent per rank and step": [
            _or_dash(run.bytes_sent_per_rank_per_step, "{:,.0f}") for run in runs
        ],
    }
    for figure, values in rows.items():
        table.add_row(figure, *values)
    return table


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_burst.tools.report")
    parser.add_argument("--run", nargs=2, action="append", required=True, metavar=("NAME", "DIR"))
    parser.add_argument("--corpus", type=Path, metavar="JSON", help="corpus.json of the corpus")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--tokens-per-step", type=int, help="tokens of one global batch")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="largest relative loss difference allowed (default: %(default)s)",
    )
    parser.add_argument(
        "--compare-steps",
        type=int,
        default=20,
        metavar="N",
        help="the first N steps must agree within the tolerance (default: %(default)s)",
    )
    parser.add_argument(
        "--no-entropy-check",
        action="store_true",
        help=f"do not ask for a loss {ENTROPY_MARGIN_NATS} nat under the unigram entropy",
    )
    return parser


def _report(args: argparse.Namespace, console: Console) -> list[str]:
    logs = {name: read_scalars(Path(directory)) for name, directory in args.run}
    if len(logs) < len(args.run):
        raise RunLogError("two runs have the same name")
    losses = {name: _losses(name, scalars) for name, scalars in logs.items()}
    runs = [summarize(name, scalars, args.tokens_per_step) for name, scalars in logs.items()]
    entropy = None
    if args.corpus is not None:
        entropy = float(json.loads(args.corpus.read_text())["unigram_entropy_nats"])
    difference = largest_difference(losses, args.compare_steps)
    overall = largest_difference(losses)
    checked = None if args.no_entropy_check else entropy
    problems = faults(runs, difference, args.tolerance, checked)
    args.output.mkdir(parents=True, exist_ok=True)
    draw_losses(losses, entropy, args.output / "loss.png")
    content = {
        "runs": [asdict(run) for run in runs],
        "compared_steps": args.compare_steps,
        "largest_difference": None if difference is None else asdict(difference),
        "largest_difference_of_all_steps": None if overall is None else asdict(overall),
        "tolerance": args.tolerance,
        "unigram_entropy_nats": entropy,
        "faults": problems,
    }
    (args.output / "report.json").write_text(json.dumps(content, indent=2) + "\n")
    console.print(_table(runs))
    if difference is not None and overall is not None:
        console.print(
            f"largest relative loss difference in the first {args.compare_steps} steps: "
            f"{difference.relative:.2e} (allowed: {args.tolerance:.0e}); in all steps: "
            f"{overall.relative:.2e}, at step {overall.step}"
        )
    for run in runs:
        if entropy is not None:
            console.print(
                f"{run.name}: {entropy - run.mean_last_losses:.3f} nat under the unigram entropy "
                f"{entropy:.4f} (asked for: {ENTROPY_MARGIN_NATS})"
            )
    console.print(f"figure and figures: {args.output / 'loss.png'}, {args.output / 'report.json'}")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    args = _parser().parse_args(argv)
    try:
        problems = _report(args, Console(highlight=False, markup=False, soft_wrap=True))
    except (RunLogError, OSError, KeyError) as error:
        problems = [str(error)]
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for problem in problems:
        errors.print(f"report: {problem}", style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
