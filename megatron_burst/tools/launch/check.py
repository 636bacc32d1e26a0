"""Says which nodes are free and healthy, asked over ssh or by Slurm."""

import argparse
import os
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron_burst.tools.launch import site
from megatron_burst.tools.launch.processes import LaunchError

ABOUT = """Asks every node at the same time and prints a line for each, and why one is not free:

  busy         memory of a GPU is in use, or a GPU or (without GPUs) the CPU is at work, or Slurm
               has given the node away
  unhealthy    no answer, an nvidia-smi that fails, ECC errors that were not corrected, fewer GPUs,
               NVLinks or active InfiniBand ports than another node has, a slower NIC, or a clock
               that is off

The status is 0 if every node is free. It changes nothing on any node.
"""
# For `sh -s` on a node, which may lack Python outside of its containers.
PROBE = r"""
echo "time=$(date +%s%3N)"
echo "cpus=$(getconf _NPROCESSORS_ONLN)"
echo "load=$(cut -d' ' -f1 /proc/loadavg)"
if command -v nvidia-smi >/dev/null 2>&1; then
    rows=$(timeout 15 nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total 2>&1) ||
        echo "fault=nvidia-smi: $(echo "$rows" | head -n 1)"
    echo "$rows" | sed 's/^/gpu=/'
    echo "nvlinks=$(timeout 15 nvidia-smi nvlink --status 2>/dev/null | grep -c 'GB/s')"
fi
for port in /sys/class/infiniband/*/ports/*; do
    if [ -r "$port/state" ]; then echo "port=$(cat "$port/state") $(cat "$port/rate")"; fi
done
"""
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
ROW = "{:<20} {:<10} {:>5} {:>12} {:>16} {:>9}  {}"
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
    skew_ms: float = 0  # of its clock, for sure: less half the time of the answer
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
        clock = f"{self.skew_ms:+.0f} ms" if n else "-"
        links = f"{n['ports']:.0f} x {n['rate_gbit']:g} Gbit/s" if n.get("ports") else "-"
        why = "; ".join(self.faults + self.occupied)
        return ROW.format(self.name, self.state, gpus, memory, links, clock, why).rstrip()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add whom to ask, and what is expected of them."""
    add = parser.add_argument
    add("--nodes", metavar='"HOST ..."', help="ask these over ssh (default: BURST_NODES)")
    add(
        "--slurm",
        action="store_true",
        help="ask the idle nodes of the partition SBATCH_PARTITION by srun (BURST_SRUN_OPTIONS), "
        "with --nodes only those",
    )
    add("--list", action="store_true", help="print the names of the free nodes alone, on one line")
    add("--memory-mib", type=float, default=500, help="in use, with which a GPU counts as free")
    add("--skew-ms", type=float, default=500, help="how far a clock may surely be off")
    add("--timeout", type=float, default=30, help="seconds to wait for an answer")


def run(args: argparse.Namespace) -> int:
    """Ask and judge the nodes; with --list the status is 0 if one is free, else if all are."""
    names = (args.nodes or ("" if args.slurm else os.environ.get("BURST_NODES", ""))).split()
    if not names and not args.slurm:
        raise LaunchError('say which nodes: --nodes "HOST ...", BURST_NODES or --slurm')
    states = _slurm_states(names) if args.slurm else dict.fromkeys(names, "idle")
    if args.dry_run:
        idle = (name for name, state in states.items() if state == "idle")
        print(*(shlex.join(_command(name, args)) for name in idle), sep="\n")
        return 0
    with ThreadPoolExecutor(len(states) or 1) as threads:
        nodes = list(threads.map(lambda name: _ask(name, states[name], args), states))
    _judge(nodes, args)
    free = [node.name for node in nodes if node.state == "free"]
    if args.list:
        print(*free)
        return 0 if free else 1
    print(ROW.format("node", "state", "GPUs", "memory used", "links", "clock", "").rstrip())
    print(*(node.row() for node in nodes), sep="\n")
    return 0 if len(free) == len(nodes) else 1


def _slurm_states(names: Sequence[str]) -> dict[str, str]:
    partition = os.environ.get("SBATCH_PARTITION")
    command = ["sinfo", "-h", "-N", "-o", "%N %T"]
    command += ["--partition", partition] if partition else []
    command += ["--nodes", ",".join(names)] if names else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LaunchError("sinfo failed")
    return dict(line.split() for line in done.stdout.splitlines())


def _command(name: str, args: argparse.Namespace) -> list[str]:
    if not args.slurm:
        return [*site.words("BURST_SSH", SSH), name, "sh", "-s"]
    command = ["srun", "--quiet", "--nodes=1", "--ntasks=1", f"--nodelist={name}", "--mpi=none"]
    command.append(f"--immediate={args.timeout:.0f}")
    for option in ("partition", "account", "qos", "gpus-per-node"):
        if value := os.environ.get(f"SBATCH_{option.upper().replace('-', '_')}"):
            command += [f"--{option}", value]
    return [*command, *site.words("BURST_SRUN_OPTIONS"), "sh", "-s"]


def _ask(name: str, state: str, args: argparse.Namespace) -> Node:
    """Ask one node, with our own clock before and after."""
    if state != "idle":
        lost = state.startswith(("down", "drain", "fail", "unknown"))
        reason = [f"Slurm says {state}"]
        return Node(name, faults=reason) if lost else Node(name, occupied=reason)
    before = time.time()
    try:
        said = subprocess.run(
            _command(name, args),
            input=PROBE,
            capture_output=True,
            text=True,
            timeout=args.timeout,
            check=True,
        ).stdout
    except subprocess.TimeoutExpired:
        return Node(name, faults=[f"no answer within {args.timeout:g} s"])
    except subprocess.CalledProcessError as error:
        first = (error.stderr.splitlines() or [f"status {error.returncode}"])[0]
        return Node(name, faults=[f"no answer: {first}"])
    after = time.time()
    node = Node(name, _numbers(said), faults=re.findall("^fault=(.*)", said, re.MULTILINE))
    off, around = node.numbers["time"] - 500 * (before + after), 500 * (after - before)
    node.skew_ms = max(off - around, 0) + min(off + around, 0)
    return node


def _numbers(said: str) -> dict[str, float]:
    """Return the numbers of an answer; of GPUs the most used one's."""
    simple = re.findall(r"^(time|cpus|load|nvlinks)=(.+)", said, re.MULTILINE)
    gpus = re.findall(r"^gpu=(\d+), (\S+), (\S+)", said, re.MULTILINE)
    rates = [*map(float, re.findall(r"^port=\d+: ACTIVE ([\d.]+)", said, re.MULTILINE))]
    rows = [[int(cell) if cell.isdigit() else 0 for cell in row] for row in gpus] or [[0, 0, 0]]
    used, busy, errors = zip(*rows, strict=True)
    return {
        **{name: float(value) for name, value in simple},
        **{
            "gpus": len(gpus),
            "memory_mib": max(used),
            "busy": max(busy),
            "ecc_errors": sum(errors),
        },
        **{"ports": len(rates), "rate_gbit": max(rates, default=0)},
    }


def _judge(nodes: Sequence[Node], args: argparse.Namespace) -> None:
    """Add what is wrong with nodes that answered, also compared with each other."""
    most = {key: max((n.numbers.get(key, 0) for n in nodes), default=0) for key in COMPARED}
    for node in (node for node in nodes if node.numbers):
        n = node.numbers
        if abs(node.skew_ms) > args.skew_ms:
            node.faults.append(f"its clock is off by {node.skew_ms:+.0f} ms")
        for key, what in COMPARED.items():
            if (here := n.get(key, 0)) < most[key]:
                node.faults.append(f"{here:g} {what}, another node has {most[key]:g}")
        if n["ecc_errors"]:
            node.faults.append(f"{n['ecc_errors']:.0f} uncorrected ECC errors")
        if n["memory_mib"] > args.memory_mib:
            node.occupied.append(f"{n['memory_mib']:.0f} MiB in use")
        elif n["busy"] > 5:
            node.occupied.append(f"a GPU is at work, {n['busy']:.0f} %")
        elif not n["gpus"] and n["load"] > n["cpus"] / 2:
            node.occupied.append(f"load {n['load']:g} on {n['cpus']:.0f} CPUs")
