"""Says which nodes are free and healthy, asked over ssh or in a job."""

import argparse
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

from megatron_burst.tools import hardware
from megatron_burst.tools.hardware import Devices
from megatron_burst.tools.launch import site, ssh

ABOUT = """Asks every node at the same time and prints a line for each, and why one is not free:
busy, or unhealthy, by uncorrected ECC errors, other GPUs, links or active ports than most nodes.

Nodes are reached as `launch ssh` does, in its container; `launch slurm --check` asks those of a job
before it trains. The status is 0 if every node is free. It changes nothing on any node.
"""
LINKS = "links between GPUs"
ROW = "{:<20} {:<10} {:<26} {:>12}  {}"
HEAD = "node", "state", "GPUs", "memory used", ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add whom to ask, and what is expected of them."""
    add = parser.add_argument
    add("--nodes", metavar='"HOST ..."', help="default: BURST_NODES")
    add("--list", action="store_true", help="print the names of the free nodes alone, on one line")
    text = "in use, with which a GPU counts as free (default: %(default)s)"
    add("--memory-mib", type=int, default=500, metavar="N", help=text)
    text = "seconds to wait for an answer (default: %(default)s)"
    add("--timeout", type=float, default=30, metavar="S", help=text)
    add("--self", action="store_true", help="print what this node says of itself, as JSON")
    text = "read what the nodes said from DIR/HOST.json, do not ask them"
    add("--answers", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Ask and judge the nodes; with --list the status is 0 if one is free, else if all are."""
    if args.self:
        print(json.dumps(hardware.read()))
        return 0
    hosts, task = ssh.hosts_of(args), (*site.LAUNCH, "check", "--self")
    commands = [ssh.connect(host, Path.cwd(), *task) for host in hosts]
    if args.dry_run:
        print(*map(shlex.join, commands), sep="\n")
        return 0
    if args.answers:
        commands = [["cat", "--", str(args.answers / f"{host}.json")] for host in hosts]
    with ThreadPoolExecutor(len(hosts)) as threads:
        answers = list(threads.map(lambda command: _ask(command, args.timeout), commands))
    kinds = [_kinds(said) for said in answers if not isinstance(said, str)]
    counted = Counter(kind for each in kinds for kind in each.items()).most_common()
    usual = dict(kind for kind, _ in reversed(counted))  # what most nodes have
    rows = [
        (host, *_judged(said, usual, args.memory_mib))
        for host, said in zip(hosts, answers, strict=True)
    ]
    free = [host for host, state, *_ in rows if state == "free"]
    if args.list:
        print(*free)
        return 0 if free else 1
    print(*(_printable(ROW.format(*row)).rstrip() for row in (HEAD, *rows)), sep="\n")
    return 0 if len(free) == len(rows) else 1


def _ask(command: Sequence[str], timeout: float) -> Devices | str:
    """Return what a node says of itself, or why it says nothing."""
    run = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, errors="replace")
    try:
        done = run(command, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    lines = done.stdout.splitlines() or [""]
    try:
        said = json.loads(lines[-1])  # behind what a login prints
    except (ValueError, RecursionError):
        first = [*done.stderr.splitlines(), *filter(None, lines), f"status {done.returncode}"][0]
        return f"no answer: {first}"
    try:
        _judged(said, _kinds(said), 0)  # whether it has what is read here
    except (KeyError, TypeError, AttributeError):
        return f"no devices: {lines[-1]}"
    return cast(Devices, said)


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _judged(
    said: Devices | str, usual: Mapping[str, str], memory_mib: int
) -> tuple[str, str, str, str]:
    """Return a node's state, its GPUs, the memory in use of the fullest, and what is wrong."""
    if isinstance(said, str):
        return "unhealthy", "-", "-", said
    kinds, memory, occupied = _kinds(said), _most(said, "memory.used"), ""
    faults = [
        f"{what}: {here or 'none'}, most nodes have {usual[what] or 'none'}"
        if what != LINKS
        else f"{what}: not those of most nodes"
        for what, here in kinds.items()
        if here != usual[what]
    ]
    if errors := _most(said, "ecc.errors.uncorrected.volatile.total"):
        faults.append(f"{errors} uncorrected ECC errors of a GPU")
    if memory > memory_mib:
        occupied = f"{memory} MiB in use"
    elif (busy := _most(said, "utilization.gpu")) > 5:
        occupied = f"a GPU is at work, {busy} %"
    state = "unhealthy" if faults else "busy" if occupied else "free"
    gpus = kinds["GPUs"] or "-"
    why = "; ".join(filter(None, [*faults, occupied]))
    return state, gpus, "-" if gpus == "-" else f"{memory} MiB", why


def _most(said: Devices, name: str) -> int:
    """The largest number of the GPUs, 0 where they do not say it."""
    found = (re.match(r"\d+", gpu.get(name, "")) for gpu in said["gpus"])
    return max((int(number[0]) for number in found if number), default=0)


def _kinds(said: Devices) -> dict[str, str]:
    gpus = Counter(gpu["name"] for gpu in said["gpus"])
    ports = Counter(p["rate"] for p in said["network"] if "ACTIVE" in p["state"])
    counted = [", ".join(f"{n} x {name}" for name, n in each.items()) for each in (gpus, ports)]
    return {"GPUs": counted[0], "active ports": counted[1], LINKS: "\n".join(said["links"])}
