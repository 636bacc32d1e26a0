#!/usr/bin/env python3
"""Writes what one node of a run is: versions, devices, links, settings and the command, as JSON.

The launchers call it on every node. It needs nothing beside Python and imports no torch.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = (
    *("torch", "triton", "megatron", "transformer-engine", "flash"),
    *("nvidia-nccl", "nvidia-cudnn"),
)
SETTINGS = tuple("BURST_ MEGATRON_BURST_ NCCL_ GLOO_ CUDA_ OMP_ TORCH_ NVTE_ SLURM_JOB".split())
GPU_FIELDS = ("name", "memory.total", "driver_version", "power.limit", "clocks.max.sm")


def describe(run: str, command: Sequence[str]) -> dict[str, object]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "run": run,
        "command": list(command),
        "commit": commit(Path(__file__).parent),
        "python": platform.python_version(),
        "versions": versions(),
        "gpus": gpus(),
        "cpu": {"model": cpu_model(), "count": len(os.sched_getaffinity(0))},
        "kernel": platform.release(),
        "links": links(Path("/sys/class")),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
    }


def versions() -> dict[str, str]:
    """The packages that training runs on; where one is installed twice, the one imported."""
    found: dict[str, str] = {}
    for package in distributions():
        name = package.name or ""
        if name.lower().startswith(PACKAGES):
            found.setdefault(name, package.version)
    return dict(sorted(found.items()))


def commit(directory: Path) -> str:
    """The commit of the repository, with "+" where tracked code was changed; "" without git."""
    git = ("git", "-C", str(directory))
    name = output(*git, "rev-parse", "--short=12", "HEAD").strip()
    code = [":/", *(f":(exclude,top){what}" for what in ("docs", "*.md", "*.csv"))]
    changed = output(*git, "status", "--porcelain", "--untracked-files=no", "--", *code).strip()
    return f"{name}+" if name and changed else name


def gpus() -> list[dict[str, str]]:
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader")
    rows = (line.split(", ") for line in output(*query).splitlines())
    return [dict(zip(GPU_FIELDS, row, strict=False)) for row in rows]


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def links(sysfs: Path) -> list[dict[str, str]]:
    """InfiniBand and RoCE ports, and network devices that say how fast they are."""
    found = []
    for port in sorted(sysfs.glob("infiniband/*/ports/*")):
        name = f"{port.parts[-3]}:{port.name}"
        found.append({"name": name, "state": text(port / "state"), "rate": text(port / "rate")})
    for device in sorted(sysfs.glob("net/*")):
        if (speed := text(device / "speed")) and speed != "-1":
            state = text(device / "operstate")
            found.append({"name": device.name, "state": state, "rate": f"{speed} Mb/s"})
    return found


def text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of a device that is down cannot be read
        return ""


def output(*command: str) -> str:
    """What a command printed; nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the file (default: standard output)")
    parser.add_argument("--run", default="", help="the name of the run")
    parser.add_argument("command", nargs="*", help="what is going to run; after --")
    args = parser.parse_args()
    content = json.dumps(describe(args.run, args.command), indent=2) + "\n"
    if args.output is None:
        sys.stdout.write(content)
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(content)


if __name__ == "__main__":
    main()
