"""Says which nodes are free and healthy, asked over ssh."""

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron_burst.tools.launch import site
from megatron_burst.tools.launch.processes import LaunchError

ABOUT = """Asks every node at the same time and prints a line for each, and why one is not free:

  busy         memory of a GPU is in use, or a GPU is at work
  unhealthy    no answer, an nvidia-smi that fails, ECC errors that were not corrected, or fewer
               GPUs, NVLinks or active InfiniBand ports than another node has, or a slower NIC

The status is 0 if every node is free. It changes nothing on any node.
"""
# For `sh -s` on a node, which may lack Python outside of its containers.
PROBE = r"""
if command -v nvidia-smi >/dev/null 2>&1; then
    rows=$(timeout 15 nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total 2>&1) ||
        echo "fault=nvidia-smi: $(echo "$rows" | head -n 1)"
    echo "$rows" | sed 's/^/gpu=/'
    timeout 15 nvidia-smi nvlink --status 2>/dev/null | grep 'GB/s' | sed 's/^/nvlink=/'
fi
for port in /sys/class/infiniband/*/ports/*; do
    if [ -r "$port/state" ]; then echo "port=$(cat "$port/state") $(cat "$port/rate")"; fi
done
"""
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
ROW = "{:<20} {:<10} {:>5} {:>12} {:>16}  {}"
COMPARED = {
    "gpus": "GPUs",
    "nvlinks": "NVLinks",
    "ports": "active ports",
    "rate_gbit": "Gbit/s a NIC",
}


@dataclass(slots=True)
class Node:
    """What a node said, and what is wrong with it."""

    name: str
    numbers: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    occupied: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """What the table calls it."""
        return "unhealthy" if self.faults else "busy" if self.occupied else "free"

    def row(self) -> str:
        """Return the line of the table."""
        n = self.numbers
        gpus, memory = "-", "-"
        if n.get("gpus"):
            gpus, memory = f"{n['gpus']:.0f}", f"{n['memory_mib']:.0f} MiB"
        links = f"{n['ports']:.0f} x {n['rate_gbit']:g} Gbit/s" if n.get("ports") else "-"
        why = "; ".join(self.faults + self.occupied)
        return ROW.format(self.name, self.state, gpus, memory, links, why).rstrip()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add whom to ask, and what is expected of them."""
    add = parser.add_argument
    add("--nodes", metavar='"HOST ..."', help="ask these over ssh (default: BURST_NODES)")
    add("--list", action="store_true", help="print the names of the free nodes alone, on one line")
    add("--memory-mib", type=float, default=500, help="in use, with which a GPU counts as free")
    add("--timeout", type=float, default=30, help="seconds to wait for an answer")


def run(args: argparse.Namespace) -> int:
    """Ask and judge the nodes; with --list the status is 0 if one is free, else if all are."""
    names = (args.nodes or os.environ.get("BURST_NODES", "")).split()
    if not names:
        raise LaunchError('say which nodes: --nodes "HOST ..." or BURST_NODES')
    if args.dry_run:
        print(*(shlex.join(_command(name)) for name in names), sep="\n")
        return 0
    with ThreadPoolExecutor(len(names)) as threads:
        nodes = list(threads.map(lambda name: _ask(name, args.timeout), names))
    _judge(nodes, args.memory_mib)
    free = [node.name for node in nodes if node.state == "free"]
    if args.list:
        print(*free)
        return 0 if free else 1
    print(ROW.format("node", "state", "GPUs", "memory used", "links", "").rstrip())
    print(*(node.row() for node in nodes), sep="\n")
    return 0 if len(free) == len(nodes) else 1


def _command(name: str) -> list[str]:
    return [*site.words("BURST_SSH", SSH), name, "sh", "-s"]


def _ask(name: str, timeout: float) -> Node:
    try:
        done = subprocess.run(
            _command(name), input=PROBE, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return Node(name, faults=[f"no answer within {timeout:g} s"])
    if done.returncode:
        first = (done.stderr.splitlines() or [f"status {done.returncode}"])[0]
        return Node(name, faults=[f"no answer: {first}"])
    faults = re.findall("^fault=(.*)", done.stdout, re.MULTILINE)
    return Node(name, _numbers(done.stdout), faults)


def _numbers(said: str) -> dict[str, float]:
    """Return the numbers of an answer; of GPUs the most used one's."""
    gpus = re.findall(r"^gpu=(\d+), (\S+), (\S+)", said, re.MULTILINE)
    rates = [*map(float, re.findall(r"^port=\d+: ACTIVE ([\d.]+)", said, re.MULTILINE))]
    rows = [[int(cell) if cell.isdigit() else 0 for cell in row] for row in gpus] or [[0, 0, 0]]
    used, busy, errors = zip(*rows, strict=True)
    return {
        "gpus": len(gpus),
        "memory_mib": max(used),
        "busy": max(busy),
        "ecc_errors": sum(errors),
        "nvlinks": said.count("\nnvlink="),
        "ports": len(rates),
        "rate_gbit": max(rates, default=0),
    }


def _judge(nodes: Sequence[Node], memory_mib: float) -> None:
    """Add what is wrong with nodes that answered, also compared with each other."""
    answered = [node for node in nodes if node.numbers]
    for key, what in COMPARED.items():
        most = max((node.numbers[key] for node in answered), default=0)
        for node in answered:
            if (here := node.numbers[key]) < most:
                node.faults.append(f"{here:g} {what}, another node has {most:g}")
    for node in answered:
        n = node.numbers
        if n["ecc_errors"]:
            node.faults.append(f"{n['ecc_errors']:.0f} uncorrected ECC errors")
        if n["memory_mib"] > memory_mib:
            node.occupied.append(f"{n['memory_mib']:.0f} MiB in use")
        elif n["busy"] > 5:
            node.occupied.append(f"a GPU is at work, {n['busy']:.0f} %")
