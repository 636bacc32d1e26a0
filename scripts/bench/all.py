#!/usr/bin/env python
"""Makes the tables and pictures of figures that README and docs show, one after the other.

    .venv/bin/python scripts/bench/all.py [--only NAME...]

Writes them where they are. Needs a quiet machine (most benchmarks wait for one, and in the end
refuse), no GPU, and for the two nodes root and iproute2. What fails does not stop the rest. Pages
that it leaves are made by what their `command` says.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "scripts/bench/results"


class Step(NamedTuple):
    minutes: int  # on two cores that do nothing else, estimated
    makes: tuple[str, ...]
    commands: tuple[str, ...]  # of Python


def _measured(
    name: str, minutes: int, flags: str = "", script: str = "", picture: str = ""
) -> Step:
    """A benchmark whose page is called `name`, and the picture of its CSV."""
    page, command = f"{RESULTS}/cpu_{name}", f"scripts/bench/{script or name}.py {flags}".strip()
    if not picture:
        return Step(minutes, (f"{page}.md",), (command,))
    draw = f"scripts/docs/plot.py {page}.csv --output {picture}"
    return Step(minutes, (f"{page}.md", picture), (command, draw))


def _made(minutes: int, command: str, makes: str) -> Step:
    """What a script of scripts/docs writes into docs."""
    pages = tuple(f"docs/{name}" for name in makes.split())
    return Step(minutes, pages, (f"scripts/docs/{command}",))


LINKS = "--mbit 200 400 800 2000 inf --places 2x2 --heads 8:8 8:2 --masks causal --launches 5"
MANY = "--mbit 100 200 inf --places 4x1 8x1 4x2 --heads 8:8 8:2 --masks causal --launches 3"
MANY += " --algorithms 'ring flat' 'ring double' 'burst query flat' 'burst query double'"
MANY += f" 'burst kv double' 'burst mesh' 'burst auto' --output {RESULTS}/cpu_many_nodes.md"
CELLS = "--places 2x2 4x1 8x1 4x2 --heads 8:8 8:2 --masks causal"
CELLS += " --algorithms 'ring flat' allgather ulysses 'burst hybrid' 'burst auto' 'burst default'"
CHOSEN = f"--mbit 200 400 1000 {CELLS} --repetitions 13 --output {RESULTS}/cpu_chosen.md"
FORCED = " 'ring double' 'ring hybrid' 'burst query flat' 'burst query double' 'burst kv double'"
FORCED += " 'burst mesh' 'burst chunks'"
PACED = f"--mbit 40 80 200 {CELLS}{FORCED} --gflops 4 --repetitions 3"
"""As 20 GFLOP/s at 200 to 1000 Mbit/s, but what two cores pack for eight ranks counts less."""
PACED_BFLOAT16 = f"{PACED} --dtype bfloat16 --output {RESULTS}/cpu_paced_bfloat16.md"
PACKED = "--places 1x2 --tokens 16384 --heads 1 --head-dim 64 --masks causal documents:2048"
PACKED += " --algorithms 'ring flat' 'burst auto' 'burst balanced'"
PACKED += f" --output {RESULTS}/cpu_packed.md"
STEPS = {
    "plans": _made(1, "plan_figure.py", "plan.svg plan-double.svg"),
    "pictures": _made(1, "pictures.py", "rooms.svg step.svg rings.svg"),
    "tables": _made(1, "tables.py", "flags.md api.md support.md"),
    "planning": _measured("planning", 1),
    "host_time": _measured("host_time", 1),
    "accuracy": _measured("accuracy", 2),
    "loss": _measured("loss", 20, "--repetitions 1", picture="docs/loss-memory.svg"),
    "recompute": _measured("recompute", 3),
    "mlp_chunks": _measured("mlp_chunks", 1, "--repetitions 15"),
    "memory": _measured("memory", 20),
    "attention": _measured("attention", 10, "--repetitions 7"),
    "two_nodes": _measured("two_nodes", 40, LINKS, "attention", "docs/two-nodes.svg"),
    "many_nodes": _measured("many_nodes", 65, MANY, "attention"),
    "chosen": _measured("chosen", 35, CHOSEN, "attention"),
    "paced": _measured("paced", 65, PACED, "attention"),
    "paced_bfloat16": _measured("paced_bfloat16", 55, PACED_BFLOAT16, "attention"),
    "packed": _measured("packed", 4, PACKED, "attention"),
    "convergence": _measured("convergence", 40, picture="docs/convergence.svg"),
    "budgets": _made(3, "budgets.py", "budgets.md budgets.csv design/nccl.md"),
    "schedules": _made(3, "schedules.py", "schedules.md schedules.csv schedules.svg"),
    "balance": _made(3, "balance.py", "masks.md balance.csv"),
    "million": _made(1, "million.py --write docs/million.md", "million.md"),
    "planner": _made(1, "planner.py --write docs/planner.md", "planner.md planner.csv planner.svg"),
}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STEPS, default=[*STEPS])
    args = parser.parse_args(given)
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    left = list(args.only)
    try:
        for name in args.only:
            print(f"all: {name}: about {STEPS[name].minutes} minutes", file=sys.stderr, flush=True)
            for command in STEPS[name].commands:
                line = [sys.executable, *shlex.split(command)]
                if subprocess.run(line, cwd=ROOT, env=os.environ | more).returncode:
                    break
            else:
                left.remove(name)
    finally:
        if left:
            print(f"all: not made: {', '.join(left)}; --only {' '.join(left)}", file=sys.stderr)
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
