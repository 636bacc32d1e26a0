"""Says which nodes are free and healthy, asked over ssh."""

import argparse
import json
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_burst.tools.launch import ssh

ABOUT = """Asks every node at the same time and prints a line for each, and why one is not free:

  busy         memory of a GPU is in use, or a GPU is at work
  unhealthy    no answer, ECC errors that were not corrected, or other GPUs, links between them or
               active InfiniBand and RoCE ports than most nodes have

Nodes are reached as `launch ssh` does, in its container. The status is 0 if every node is free. It
changes nothing on any node.
"""
LINKS = "links between GPUs"
ROW = "{:<20} {:<10} {:<26} {:>12}  {}"


@dataclass(slots=True)
class Node:
    """What a node said, and what is wrong with it."""

    name: str
    kinds: dict[str, str] = field(default_factory=dict)  # what most nodes should have alike
    memory_mib: int = 0  # in use, of the fullest GPU
    faults: list[str] = field(default_factory=list)
    occupied: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """What the table calls it."""
        return "unhealthy" if self.faults else "busy" if self.occupied else "free"

    def row(self) -> str:
        """Return the line of the table."""
        gpus, why = self.kinds.get("GPUs") or "-", "; ".join(self.faults + self.occupied)
        memory = "-" if gpus == "-" else f"{self.memory_mib} MiB"
        return ROW.format(self.name, self.state, gpus, memory, why).rstrip()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add whom to ask, and what is expected of them."""
    add = parser.add_argument
    add("--nodes", metavar='"HOST ..."', help="default: BURST_NODES")
    add("--list", action="store_true", help="print the names of the free nodes alone, on one line")
    add("--memory-mib", type=int, default=500, help="in use, with which a GPU counts as free")
    add("--timeout", type=float, default=30, help="seconds to wait for an answer")


def run(args: argparse.Namespace) -> int:
    """Ask and judge the nodes; with --list the status is 0 if one is free, else if all are."""
    hosts, task = ssh.hosts_of(args), ("-m", "megatron_burst.tools.hardware")
    commands = {host: ssh.connect(host, Path.cwd(), *task) for host in hosts}
    if args.dry_run:
        print(*map(shlex.join, commands.values()), sep="\n")
        return 0
    with ThreadPoolExecutor(len(hosts)) as threads:
        nodes = list(threads.map(lambda host: _ask(host, commands[host], args), hosts))
    if answered := [node for node in nodes if node.kinds]:
        _compare(answered)
    free = [node.name for node in nodes if node.state == "free"]
    if args.list:
        print(*free)
        return 0 if free else 1
    print(ROW.format("node", "state", "GPUs", "memory used", "").rstrip())
    print(*(node.row() for node in nodes), sep="\n")
    return 0 if len(free) == len(nodes) else 1


def _ask(host: str, command: Sequence[str], args: argparse.Namespace) -> Node:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=args.timeout,
        )
    except subprocess.TimeoutExpired:
        return Node(host, faults=[f"no answer within {args.timeout:g} s"])
    lines = done.stdout.splitlines() or [""]
    try:
        said = json.loads(lines[-1])  # behind what a login prints
    except ValueError:
        first = [*done.stderr.splitlines(), *filter(None, lines), f"status {done.returncode}"][0]
        return Node(host, faults=[f"no answer: {first}"])
    node = Node(host, _kinds(said))
    node.memory_mib = _most(said, "memory.used")
    if errors := _most(said, "ecc.errors.uncorrected.volatile.total"):
        node.faults.append(f"{errors} uncorrected ECC errors of a GPU")
    if node.memory_mib > args.memory_mib:
        node.occupied.append(f"{node.memory_mib} MiB in use")
    elif (busy := _most(said, "utilization.gpu")) > 5:
        node.occupied.append(f"a GPU is at work, {busy} %")
    return node


def _most(said: dict[str, Any], name: str) -> int:
    """The largest number of the GPUs, 0 where they do not say it."""
    found = (re.match(r"\d+", gpu.get(name, "")) for gpu in said["gpus"])
    return max((int(number[0]) for number in found if number), default=0)


def _kinds(said: dict[str, Any]) -> dict[str, str]:
    gpus = Counter(gpu["name"] for gpu in said["gpus"])
    ports = Counter(p["rate"] for p in said["network"] if "ACTIVE" in p["state"])
    counted = [", ".join(f"{n} x {name}" for name, n in each.items()) for each in (gpus, ports)]
    return {"GPUs": counted[0], "active ports": counted[1], LINKS: "\n".join(said["links"])}


def _compare(nodes: Sequence[Node]) -> None:
    """Add by what nodes differ from most of them."""
    for what in nodes[0].kinds:
        usual = Counter(node.kinds[what] for node in nodes).most_common(1)[0][0]
        for node in (node for node in nodes if node.kinds[what] != usual):
            here = node.kinds[what] or "none"
            differs = f"{here}, most nodes have {usual or 'none'}"
            node.faults.append(f"{what}: {differs if what != LINKS else 'not those of most nodes'}")
