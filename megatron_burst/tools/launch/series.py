"""Runs a series of trainings, sizes x methods x ablations, and goes on where it stopped."""

import argparse
import re
import shlex
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from megatron_burst.tools.launch import node, site
from megatron_burst.tools.launch.processes import LaunchError, Signals, say, supervise

ABOUT = """Runs every combination, one after the other, each in DIR/SIZE.METHOD.ABLATION.

  megatron-burst launch series --sizes "toy scaling-*" --methods "burst ring" \\
      --launcher "scripts/launch.slurm --nodes 4 --wait"

At the end all are collected into DIR/results.csv and DIR/results.json. What has finished is not run
again: after an interruption give the same command. One that fails does not stop the others; it is
tried again by the next call.

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
    output = (args.output or Path("runs/series")).absolute()
    signals, failed = Signals(), 0
    for name, command in _commands(args, output).items():
        status = _status(output / name)
        if args.dry_run:
            subprocess.run(command)
        elif args.list or not status.startswith(("to do", "failed")):
            print(f"{name}: {status}", flush=True)
        else:
            print(f"-- {name}", flush=True)
            failed += supervise([(name, command)], signals) != 0
        if signals.ended:
            say(f"stopped in {name}; the same command goes on")
            return INTERRUPTED
    if not (args.dry_run or args.list):
        collect = ["-m", "megatron_burst", "compare", "--collect", str(output)]
        subprocess.run([site.python_of_training(), *collect], check=True)
    if failed:
        say(f"{failed} run(s) failed; the same command tries them again")
    return 1 if failed else 0


def _commands(args: argparse.Namespace, output: Path) -> dict[str, list[str]]:
    """Return what starts each combination, by its name."""
    defined = METHODS | ABLATIONS | {"-": ""} | dict(d.split("=", 1) for d in args.define)
    if unknown := {*args.methods.split(), *args.ablations.split()} - defined.keys():
        names = ", ".join(defined)
        raise LaunchError(f"no method or ablation {', '.join(unknown)}; there are {names}")
    sizes = [size for word in args.sizes.split() for size in _expand(word)]
    start = shlex.split(args.launcher) or [site.python_of_training(), *site.LAUNCH, "local"]
    start += ["--dry-run"] if args.dry_run else []
    found = {}
    for case in product(sizes, args.methods.split(), args.ablations.split()):
        name = ".".join(part for part in case if part != "-") or "run"
        size, *flags = case
        found[name] = [*start, "--output", str(output / name)]
        found[name] += ["--run", size] if size != "-" else []
        found[name] += [word for each in flags for word in shlex.split(defined[each])]
        found[name] += node.given(args)
    return found


def _expand(word: str) -> Sequence[str]:
    """Return the named runs that a shell pattern means."""
    return site.plan("--list", word) if re.search(r"[*?[]", word) else [word]


def _status(directory: Path) -> str:
    """Say whether a run finished, failed with a status, is in Slurm's queue, or is still to do."""
    file = directory / "status"
    status = file.read_text().strip() if file.exists() else ""
    if status == "0":
        return "finished"
    if str(directory) in _comments():
        return "in the queue"
    return f"failed with status {status}" if status else "to do"


def _comments() -> list[str]:
    """Return the comments of our jobs in Slurm's queue: `launch slurm` writes the output there."""
    try:
        command = ["squeue", "-h", "--me", "-o", "%k"]
        return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    except OSError:  # no Slurm here
        return []
