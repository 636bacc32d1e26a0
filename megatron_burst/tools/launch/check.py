"""Says which nodes are free and healthy, asked over ssh."""

import argparse
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_burst.tools.launch import site, ssh

ABOUT = """Asks every node at the same time, by nvidia-smi over ssh, and prints a line for each, and
why one is not free: busy, or unhealthy, by uncorrected ECC errors, a lost GPU, other GPUs than most
nodes or no answer. Slurm's own nodes: `sinfo -R`. The status is 0 if every node is free; nothing is
changed.
"""
FIELDS = "name", "memory.used", "utilization.gpu", "ecc.errors.uncorrected.volatile.total"
QUERY = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
BROKEN = re.compile("lost|reset|err", re.IGNORECASE)  # as [GPU is lost]; [N/A] is none
FREE_MIB, FREE_PERCENT = 500, 5  # of a GPU in use, with which it counts as free
SECONDS = 30.0  # to wait for an answer
ROW = "{:<20} {:<10} {:<26} {:>12}  {}"

type Gpus = Sequence[Mapping[str, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add whom to ask."""
    parser.add_argument("--nodes", metavar='"HOST ..."', help="default: BURST_NODES")
    text = "print the names of the free nodes alone, on one line"
    parser.add_argument("--list", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Ask and judge the nodes; with --list the status is 0 if one is free, else if all are."""
    hosts = ssh.hosts_of(args)
    commands = [[*site.words("BURST_SSH", ssh.SSH), host, shlex.join(QUERY)] for host in hosts]
    if args.dry_run:
        print(*map(shlex.join, commands), sep="\n")
        return 0
    with ThreadPoolExecutor(len(hosts)) as threads:
        answers = dict(zip(hosts, threads.map(_ask, commands), strict=True))
    kinds = Counter(_kind(gpus) for gpus in answers.values() if not isinstance(gpus, str))
    usual = next(iter(kinds.most_common(1)), ("", 0))[0]
    rows = [(host, *_judged(said, usual)) for host, said in answers.items()]
    free = [host for host, state, *_ in rows if state == "free"]
    if args.list:
        print(*free)
        return 0 if free else 1
    print(ROW.format("node", "state", "GPUs", "memory used", "").rstrip())
    for row in rows:  # without what a terminal would obey
        print("".join(c if c.isprintable() else "?" for c in ROW.format(*row)).rstrip())
    return 0 if len(free) == len(rows) else 1


def _ask(command: Sequence[str]) -> Gpus | str:
    """Return what a node says of its GPUs, or why it says nothing."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {SECONDS:g} s"
    rows = [line.split(", ") for line in done.stdout.splitlines()]  # behind what a login prints
    gpus = [dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS)]
    if gpus:
        return gpus
    said = [*done.stderr.splitlines(), *done.stdout.splitlines(), f"status {done.returncode}"]
    return f"no answer: {said[0]}"


def _judged(said: Gpus | str, usual: str) -> tuple[str, str, str, str]:
    """Return a node's state, its GPUs, the memory in use of the fullest, and what is wrong."""
    if isinstance(said, str):
        return "unhealthy", "-", "-", said
    kind, (memory, work, errors) = _kind(said), (_most(said, name) for name in FIELDS[1:])
    faults = [f"GPUs: {kind}, most nodes have {usual}"] if kind != usual else []
    faults += [f"{errors} uncorrected ECC errors of a GPU"] if errors else []
    answers = (gpu[name] for gpu in said for name in FIELDS[1:])
    faults += [f"a GPU says {text}" for text in dict.fromkeys(filter(BROKEN.search, answers))]
    busy = f"{memory} MiB in use" if memory > FREE_MIB else ""
    busy = busy or (f"a GPU is at work, {work} %" if work > FREE_PERCENT else "")
    state = "unhealthy" if faults else "busy" if busy else "free"
    return state, kind, f"{memory} MiB", "; ".join(filter(None, [*faults, busy]))


def _kind(gpus: Gpus) -> str:
    return ", ".join(f"{n} x {name}" for name, n in Counter(gpu["name"] for gpu in gpus).items())


def _most(gpus: Gpus, name: str) -> int:
    """The largest number of the GPUs, 0 where they do not say it."""
    return max(int(gpu[name]) if gpu[name].isdecimal() else 0 for gpu in gpus)
