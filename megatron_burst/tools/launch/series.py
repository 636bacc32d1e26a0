"""Runs a series of trainings, sizes x methods x ablations, and goes on where it stopped."""

import argparse
import fcntl
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.launch.processes import LaunchError, Signals, say, supervise

ABOUT = """Runs every combination, one after the other, each in DIR/SIZE.METHOD.ABLATION.

  megatron-burst launch series --sizes "toy scaling-*" --methods "burst ring" \\
      --launcher "scripts/launch.slurm --nodes 4 --wait"

At the end all are collected into DIR/results.csv and DIR/results.json. What has finished is not run
again: after an interruption give the same command. One that fails does not stop the others; it is
tried again by the next call. A single series works in a directory at a time.

Of sizes, methods and ablations - is none, which is the default: your own flags, what the run says,
nothing changed. Flags that come later win: those of the size, of the method, of the ablation, and
yours. Another machine, commit or flags: take another DIR.
"""
METHODS = {
    "burst": "--context-parallel-algo burst",
    "ring": "--context-parallel-algo ring --burst-topology flat",
    "double-ring": "--context-parallel-algo ring --burst-topology double",
    "usp": "--context-parallel-algo ring --burst-topology flat --burst-head-parallel-size 8",
    "allgather": "--context-parallel-algo allgather",
    "ulysses": "--context-parallel-algo ulysses",
    # Not given, its dropouts were 0.1, and those of the others 0.
    "megatron": "--context-parallel-algo megatron --attention-dropout 0 --hidden-dropout 0",
}
ABLATIONS = {
    "flat-ring": "--burst-topology flat",
    "kv-backward": "--burst-backward kv",
    "query-backward": "--burst-backward query",
    "all-logits": "--lm-head-loss megatron",
    "no-kept-attention": "--recompute-attention-fraction 1",
}
INTERRUPTED = 130


class Case(NamedTuple):
    """One combination; "-" is none."""

    size: str
    method: str
    ablation: str

    def __str__(self) -> str:
        return ".".join(part for part in self if part != "-") or "run"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is combined, and what starts a run."""

    def add(name: str, text: str, default: str = "-") -> None:
        parser.add_argument(name, default=default, metavar='"NAME ..."', help=text)

    add("--sizes", "named runs of configs/, or shell patterns of them")
    add("--methods", ", ".join(METHODS))
    add("--ablations", ", ".join(ABLATIONS))
    add("--launcher", 'what starts a run (default: "launch local" of this Python)', "")
    text = "another method or ablation; may be given again"
    parser.add_argument("--define", action="append", default=[], metavar="NAME=FLAGS", help=text)
    text = "print the combinations and which have finished, run nothing"
    parser.add_argument("--list", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Run what has not finished; return 0 if nothing failed."""
    defined = METHODS | ABLATIONS | {"-": ""} | dict(d.split("=", 1) for d in args.define)
    for name in (*args.methods.split(), *args.ablations.split()):
        if name not in defined:
            raise LaunchError(f"no method or ablation {name}; there are {', '.join(defined)}")
    output = (args.output or Path("runs/series")).absolute()
    sizes = [size for word in args.sizes.split() for size in _expand(word)]
    cases = [*map(Case._make, product(sizes, args.methods.split(), args.ablations.split()))]
    if args.list:
        for case in cases:
            print(f"{case}: {_status(output / str(case))}")
        return 0
    commands = {case: _command(args, output, case, defined) for case in cases}
    if args.dry_run:
        for command in commands.values():
            subprocess.run(command)
        return 0
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(f"another series runs in {output}") from None
        return _run_all(output, commands)


def _run_all(output: Path, commands: dict[Case, list[str]]) -> int:
    signals, failed = Signals(), 0
    for case, command in commands.items():
        status = _status(output / str(case))
        if not status.startswith(("to do", "failed")):
            print(f"{case}: {status}", flush=True)
            continue
        print(f"-- {case}", flush=True)
        failed += supervise(command, signals) != 0
        if signals.ended:
            say(f"stopped in {case}; the same command goes on")
            return INTERRUPTED
    collect = ["-m", "megatron_burst", "compare", "--collect", str(output)]
    subprocess.run([site.python_of_training(), *collect], check=True)
    if failed:
        say(f"{failed} run(s) failed; the same command tries them again")
    return 1 if failed else 0


def _command(
    args: argparse.Namespace, output: Path, case: Case, defined: dict[str, str]
) -> list[str]:
    local = [site.python_of_training(), *site.LAUNCH, "local"]
    start = shlex.split(args.launcher) or local
    options = ["--output", str(output / str(case)), *(["--dry-run"] if args.dry_run else [])]
    options += [] if case.size == "-" else ["--run", case.size]
    flags = shlex.split(f"{defined[case.method]} {defined[case.ablation]}")
    return [*start, *options, *flags, *node.given(args)]


def _expand(word: str) -> Sequence[str]:
    """Return the named runs that a shell pattern means."""
    if not re.search(r"[*?[]", word):
        return [word]
    command = [site.python_of_training(), "-m", "megatron_burst", "plan", "--list", word]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode or not done.stdout.strip():
        raise LaunchError(f"no run of configs/ matches {word}")
    return done.stdout.split()


def _status(directory: Path) -> str:
    """Say whether a run finished, failed with a status, is in Slurm's queue, or is still to do."""
    found = {name: _text(directory / name) for name in ("status", "job")}
    if found["status"] == "0":
        return "finished"
    if (found["job"] and any(_queue("-j", found["job"], "-o", "%T"))) or (
        str(directory) in _queue("--me", "-o", "%k")
    ):
        return "in the queue"
    return f"failed with status {found['status']}" if found["status"] else "to do"


def _queue(*options: str) -> list[str]:
    try:
        done = subprocess.run(["squeue", "-h", *options], capture_output=True, text=True)
    except OSError:  # no Slurm here
        return []
    return done.stdout.split("\n") if done.returncode == 0 else []


def _text(path: Path) -> str:
    return path.read_text().strip() if os.access(path, os.R_OK) else ""
