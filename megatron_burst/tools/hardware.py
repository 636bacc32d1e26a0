"""What a machine is: versions, GPUs and the links between them, network ports. Imports no torch.

GPUs are what `nvidia-smi` says, links between them the table of `nvidia-smi topo -m`: NV18 are 18
NVLinks, PIX and PXB PCIe switches, PHB a host bridge, NODE and SYS between sockets.
"""

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from megatron_burst.transport.ports import SYSFS as SYSFS
from megatron_burst.transport.ports import fastest_ports as fastest_ports
from megatron_burst.transport.ports import network as network

SETTINGS = tuple(
    "BURST_ MEGATRON_BURST_ NCCL_ GLOO_ CUDA_ CUBLAS_ OMP_ PYTORCH_ TORCH_ NVTE_ SLURM_JOB "
    "MASTER_ADDR".split()
)
_PACKAGES = tuple(
    "torch triton numpy megatron transformer-engine flash nvidia-nccl nvidia-cudnn".split()
)
_GPU_FIELDS = tuple(
    "name memory.total driver_version power.limit clocks.max.sm compute_cap "
    "pcie.link.gen.max pcie.link.width.max mig.mode.current memory.used utilization.gpu "
    "ecc.errors.uncorrected.volatile.total".split()
)


type Devices = Mapping[str, Sequence[Any]]


def read(sysfs: Path = SYSFS) -> Devices:
    """Return the devices of this machine: `gpus`, `links` between them, `network`."""
    return {"gpus": gpus(), "links": gpu_links(), "network": network(sysfs)}


def describe(run: str, command: Sequence[str]) -> dict[str, object]:
    """Return what a node of a run is, for a JSON file beside its log."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "run": run,
        "command": list(command),
        "commit": commit(Path(__file__).parent),
        "python": platform.python_version(),
        "versions": versions(),
        **read(),
        "cpu": {"model": cpu_model(), "count": len(os.sched_getaffinity(0))},
        "kernel": platform.release(),
        "settings": settings(os.environ),
    }


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NCCL, torch, CUDA and the launchers read, sorted."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(SETTINGS)}


@cache
def versions() -> Mapping[str, str]:
    """Return the packages that training runs on; of one installed twice that which is imported."""
    from importlib.metadata import distributions  # a third of what starting a launcher takes

    packages: dict[str, str] = {}
    for package in distributions():
        name = package.name or ""
        if name.lower().startswith(_PACKAGES):
            packages.setdefault(name, package.version)
    return dict(sorted(packages.items()))


def commit(directory: Path) -> str:
    """Return the commit of the repository, "+" behind it where code was changed; "" without git."""
    git = ("git", "-C", str(directory))
    name = output(*git, "rev-parse", "--short=12", "HEAD").strip()
    code = [":/", *(f":(exclude,top){what}" for what in ("docs", "*.md", "*.csv"))]
    changed = output(*git, "status", "--porcelain", "--untracked-files=no", "--", *code).strip()
    return f"{name}+" if name and changed else name


def cpu_model() -> str:
    """Return the name of the processor."""
    match = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def gpus() -> list[dict[str, str]]:
    """Return each GPU's fields; none where there is no driver."""
    query = ("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader")
    rows = (line.split(", ") for line in output(*query).splitlines())
    return [dict(zip(_GPU_FIELDS, row, strict=False)) for row in rows]


def gpu_links() -> list[str]:
    """Return the table of `nvidia-smi topo -m`, a row and a column for each GPU and NIC."""
    table, _, _ = output("nvidia-smi", "topo", "-m").partition("\n\n")  # then comes a legend
    return re.sub(r"\x1b\[\d*m", "", table).splitlines()


def output(*command: str) -> str:
    """Return what a command printed; nothing where it is missing, fails or hangs."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
