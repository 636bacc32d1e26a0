#!/usr/bin/env python
"""Times whole training steps: algorithms, ways of the loss, and what recompute repeats.

    python scripts/bench/end_to_end.py [--rounds 3]
    python scripts/bench/end_to_end.py --ranks 8 -- MEGATRON-FLAGS

Trains by `megatron-burst compare`, with its toy on the CPU, or on --ranks GPUs with
the flags that are given. A round trains each case once, in a new order. Interrupted, the same
command goes on: finished trainings stay in --work until the page is written.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from page import Page, Row, origin, output, parse, parser, table
from turns import check_load, in_turns, progress

ROOT = Path(__file__).resolve().parents[2]
CHUNKED = ("--lm-head-loss", "chunked")
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
HALF = (*FULL, "--burst-layout", "segmented-zigzag", "--recompute-attention-fraction", "0.5")
BASELINE = "ring flat"


class Case(NamedTuple):
    """What compare calls a variant, and flags beside it."""

    setting: str
    variant: str
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.variant + (f", {self.setting}" if self.setting else "")


ALGORITHMS = (
    "CP=1 burst",
    BASELINE,
    "ring double",
    "ring heads 2",
    "allgather",
    "ulysses",
    "burst",
    "burst heads 2",
)
CASES = (
    *(Case("", name) for name in ALGORITHMS),
    Case("chunked loss", "burst", CHUNKED),
    Case("all runs again", "burst", tuple(FULL)),
    Case("half of attention runs again", "burst", HALF),
    Case("half of attention runs again, chunked loss", "burst", (*HALF, *CHUNKED)),
)


def train(args: argparse.Namespace, case: Case, trained: Counter[Case]) -> Mapping[str, Any]:
    """Train once more; return what compare found, nothing where the case cannot run here.

    Raises:
        RuntimeError: the training failed.
    """
    trained[case] += 1
    folder = args.work / f"{trained[case]}-{CASES.index(case)}"
    progress(f"{case}: round {trained[case]}/{args.rounds}")
    command = compare(args, case, folder)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        found = json.loads((folder / "compare.json").read_text())["results"]
    except FileNotFoundError:
        raise RuntimeError(f"{case}: {done.stdout[-2000:]}{done.stderr[-2000:]}") from None
    (result,) = (one for one in found if one["name"] == case.variant)
    if result["status"] == "cannot run":
        progress(f"{case} cannot run: {result['reason']}")
        return {}
    if result["status"] != "ran":
        raise RuntimeError(f"{case}: {result['reason']}")
    return result


def compare(args: argparse.Namespace, case: Case, folder: Path) -> list[str]:
    """Return the command that trains one case."""
    where = ["--ranks", str(args.ranks)] if args.ranks else ["--toy"]
    options = ["--no-trace", "--variants", case.variant, "--output", str(folder)]
    module = [sys.executable, "-m", "megatron_burst", "compare"]
    more = shlex.split(args.compare)
    return [*module, *where, *options, *more, "--", *args.flags, *case.flags]


def rows(found: Mapping[Case, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return a row for each case: medians over the rounds, and their ratio to the baseline's."""
    found = {case: runs for case, runs in found.items() if all(runs)}
    times = {case: [one["seconds_per_step"] for one in runs] for case, runs in found.items()}
    baseline = next(median(times[case]) for case in times if case[:2] == ("", BASELINE))
    return [
        {
            "benchmark": "end_to_end",
            "case": str(case),
            "variant": case.variant,
            "flags": " ".join(case.flags),
            "ranks": runs[0]["ranks"],
            "steps": runs[0]["steps"],
            "rounds": len(runs),
            "median_s": median(times[case]),
            "least_s": min(times[case]),
            "largest_s": max(times[case]),
            "ratio": median(times[case]) / baseline,
            "tokens_per_second_per_rank": median(one["tokens_per_second_per_gpu"] for one in runs),
            "peak_memory_bytes": median(one["peak_memory_bytes"] or 0 for one in runs),
            "bytes_of_a_rank_and_step": runs[0]["bytes_sent_per_rank_per_step"] or 0,
            "last_loss": runs[0]["losses"][-1][1],
        }
        for case, runs in found.items()
    ]


def body(found: Sequence[Row]) -> str:
    head = f"case, ms a step, least to most, ratio to {BASELINE}, tokens/s a rank, peak GiB, "
    head += "MiB sent, last loss"
    lines = (
        [
            row["case"],
            f"{1e3 * row['median_s']:.0f}",
            f"{1e3 * row['least_s']:.0f}-{1e3 * row['largest_s']:.0f}",
            f"{row['ratio']:.3f}",
            f"{row['tokens_per_second_per_rank']:.0f}",
            f"{row['peak_memory_bytes'] / 2**30:.2f}",
            f"{row['bytes_of_a_rank_and_step'] / 2**20:.2f}",
            f"{row['last_loss']:.5f}",
        ]
        for row in found
    )
    return table(head.split(", "), lines, numbers=1)


ABOUT = """
{what}. A case is a training of `megatron-burst compare`; the time of a step is the median of its
steps, and here the median of {rounds} rounds, each with every case in a new order; a ratio is that
of two of these medians, and no more exact than their spread beside it. Peak memory is that of
tensors on a GPU, without one that of a whole process with its libraries; sent is what attention
sends, of a rank in a step.
"""


def flags(arguments: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "end_to_end")
    add = made.add_argument
    add("--ranks", type=int, help="GPUs (default: four ranks on the CPU)")
    add("--rounds", type=int, default=3)
    add("--compare", default="", metavar="OPTIONS", help="of compare, as '--ranks-per-node 8'")
    add("--cases", nargs="+", default=[*map(str, CASES)], metavar="CASE")
    add("--work", type=Path, default=ROOT / "runs" / "bench" / "end_to_end")
    add("--force", action="store_true", help="measure under load too")
    add("flags", nargs="*", metavar="MEGATRON-FLAGS", help="after --")
    args = parse(made, arguments)
    if unknown := set(args.cases) - {*map(str, CASES)}:
        made.error(f"--cases {', '.join(unknown)}: known are '{"', '".join(map(str, CASES))}'")
    if BASELINE not in args.cases:
        made.error(f"--cases must name '{BASELINE}'")
    if bool(args.ranks) != bool(args.flags):
        made.error("--ranks and the flags of a model go together")
    args.device = "cuda" if args.ranks else "cpu"
    return args


def main() -> None:
    args = flags(sys.argv[1:])
    torch.set_num_threads(1)
    here = origin(args.device, check_load(args.force))
    trained: Counter[Case] = Counter()
    ways = {case: partial(train, args, case, trained) for case in CASES if str(case) in args.cases}
    try:
        found = rows(in_turns(ways, args.rounds, warm_up=0))
    except RuntimeError as error:
        sys.exit(f"end_to_end: {error}")
    what = shlex.join(args.flags) if args.flags else "The toy of compare, on ranks that are 2 x 2"
    about = ABOUT.format(what=what, rounds=args.rounds)
    Page("Whole training steps", about, body(found), found, here).publish(
        output(args, "end_to_end")
    )
    shutil.rmtree(args.work)


if __name__ == "__main__":
    main()
