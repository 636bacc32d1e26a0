#!/usr/bin/env python
"""Trains one model by stock attention, by burst on one rank and on four, with several seeds.

    python scripts/bench/convergence.py [--steps 2000] [--seeds 1234 4321]

Runs `megatron-burst compare --toy` once for each seed: all of a seed start from the same weights
and read the same tokens. Whether context parallelism changes what is learned shows in the losses:
the difference between algorithms is held against the difference between seeds. What is finished is
kept in --runs, so an interrupted series goes on. No time is measured, so the machine may be busy.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import batched, combinations
from pathlib import Path
from statistics import fmean

from harness import Flags, Row, origin, progress, publish, table

from megatron_burst.tools import runlog

VARIANTS = {"stock": "CP=1 megatron", "burst CP 1": "CP=1 burst", "burst CP 4": "burst query flat"}
VALIDATION = "lm loss validation"
EVERY = 20  # steps whose mean is a point of a curve
LAST = 200  # steps whose mean is a run's training loss
_MODEL = "--hidden-size 64 --ffn-hidden-size 256 --seq-length 512 --max-position-embeddings 512"
_DATA = "--split 95,5,0 --eval-iters 16"
PAGE = f"""
# Convergence: the same training by stock attention, by burst on one rank and on four

The toy of `compare`, {{steps}} steps of 1024 tokens, hidden size 64, sequences of 512, in the
precision of the device (float32 on a CPU). The training loss is the mean of the last {LAST} steps.

{{losses}}

What lies between two algorithms of one seed, and between two seeds of one algorithm (the largest of
all pairs):

{{pairs}}

**The difference between algorithms is {{verdict}} the difference between seeds.**
"""

type Run = tuple[str, int]  # a variant and a seed
type Curves = dict[Run, runlog.Series]
type Ends = Mapping[Run, Mapping[str, float]]  # of each run both losses, in nats


def main(given: Sequence[str] | None = None) -> int:
    parser = Flags(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 4321])
    parser.add_argument("--runs", type=Path, default=Path("runs/convergence"))
    args = parser.read(given)
    if len(args.seeds) < 2:
        parser.error("--seeds: the difference between seeds needs two")
    if args.steps % EVERY or args.steps < LAST:
        parser.error(f"--steps {args.steps} is no multiple of {EVERY} of at least {LAST}")
    start = origin(args.device)
    training: Curves = {}
    validation: Curves = {}
    for seed in args.seeds:
        for name, folder in trained(args.runs / str(seed), args.steps, seed).items():
            scalars = runlog.read_scalars(folder / "tensorboard")
            training[name, seed] = scalars[runlog.LOSS]
            validation[name, seed] = scalars[VALIDATION]
    ends = {key: end(training[key], validation[key]) for key in training}
    pairs = {kind: apart(ends, kind) for kind in ("training", "validation")}
    verdict = "below" if all(a < b for a, b in pairs.values()) else "NOT below"
    words = {"losses": _runs(ends), "pairs": _pairs(pairs), "verdict": verdict}
    publish(args, "convergence", PAGE, _rows(training, validation), start, **words)
    return 0


def trained(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """Train all of one seed, but for what is finished; return where each one's run is."""
    progress(f"convergence: seed {seed}, in {folder}")
    command = [sys.executable, "-m", "megatron_burst", "compare", "--toy", "--no-trace"]
    command += ["--variants", ",".join(VARIANTS.values()), "--output", str(folder), "--"]
    command += [*_MODEL.split(), *_DATA.split(), "--seed", str(seed), "--train-iters", str(steps)]
    command += ["--eval-interval", str(max(steps // 10, 1))]
    subprocess.run(command, check=True)
    return {
        name: folder / "runs" / variant.lower().replace("=", "-").replace(" ", "-")
        for name, variant in VARIANTS.items()
    }


def end(training: runlog.Series, validation: runlog.Series) -> dict[str, float]:
    """Return a run's training loss and its last validation loss, in nats."""
    mean = fmean(loss for _, loss in training[-LAST:])
    return {"training": mean, "validation": validation[-1][1]}


def apart(ends: Ends, kind: str) -> tuple[float, float]:
    """Return the largest difference between algorithms of one seed, and between seeds of one."""
    algorithms = seeds = 0.0
    for (a, b), (c, d) in combinations(ends, 2):
        difference = abs(ends[a, b][kind] - ends[c, d][kind])
        if b == d:
            algorithms = max(algorithms, difference)
        elif a == c:
            seeds = max(seeds, difference)
    return algorithms, seeds


def _runs(ends: Ends) -> str:
    lines = (
        [name, str(seed), f"{losses['training']:.5f}", f"{losses['validation']:.5f}"]
        for (name, seed), losses in ends.items()
    )
    return table(["run", "seed", "training loss", "validation loss"], lines)


def _pairs(pairs: Mapping[str, tuple[float, float]]) -> str:
    lines = ([kind, *(f"{x:.1e}" for x in both)] for kind, both in pairs.items())
    return table(["loss", "between algorithms", "between seeds"], lines)


def _rows(training: Curves, validation: Curves) -> list[Row]:
    rows: list[Row] = []
    for (name, seed), series in training.items():
        key = {"run": name, "seed": seed}
        for part in batched(series, EVERY):
            loss = fmean(loss for _, loss in part)
            rows.append(key | {"step": part[-1][0], "loss": "training", "nats": loss})
        for step, loss in validation[name, seed]:
            rows.append(key | {"step": step, "loss": "validation", "nats": loss})
    return rows


if __name__ == "__main__":
    sys.exit(main())
