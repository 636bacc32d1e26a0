"""The GPUs of this machine and the links between them, by nvidia-ml-py; and its network cards."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from megatron_burst.tools.doctor.finding import Finding, Level

INFINIBAND = Path("/sys/class/infiniband")
_ANCESTORS = (
    ("NVML_TOPOLOGY_INTERNAL", "one board"),
    ("NVML_TOPOLOGY_SINGLE", "one PCIe switch"),
    ("NVML_TOPOLOGY_MULTIPLE", "several PCIe switches"),
    ("NVML_TOPOLOGY_HOSTBRIDGE", "one host bridge"),
    ("NVML_TOPOLOGY_NODE", "one CPU socket"),
    ("NVML_TOPOLOGY_SYSTEM", "between CPU sockets"),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str
    memory_gib: float
    capability: tuple[int, int]
    pcie: str
    nvlinks: int  # that are up
    to_switch: bool  # whether they lead to an NVSwitch
    is_mig: bool


@dataclass(frozen=True, slots=True)
class Hardware:
    """What was found; `missing` says why there is nothing."""

    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    links: dict[str, str] = field(default_factory=dict)  # "0-1": by what two GPUs are joined
    network: tuple[str, ...] = ()
    missing: str = ""


def read(nvml: Any = None, infiniband: Path = INFINIBAND) -> Hardware:
    """Read this machine; `nvml` is nvidia-ml-py's module, imported where it is not given."""
    network = network_cards(infiniband)
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            missing = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
            return Hardware(network=network, missing=missing)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Hardware(network=network, missing=f"there is no NVIDIA driver here: {error}")
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return Hardware(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            gpus=tuple(_gpu(nvml, handle) for handle in handles),
            links={
                f"{i}-{j}": _link(nvml, handles[i], handles[j])
                for i, j in combinations(range(len(handles)), 2)
            },
            network=network,
        )
    finally:
        nvml.nvmlShutdown()


def network_cards(infiniband: Path) -> tuple[str, ...]:
    """Return the InfiniBand and RoCE ports that the kernel knows, with their rates."""
    ports = sorted(infiniband.glob("*/ports/*"))
    return tuple(
        f"{port.parts[-3]} port {port.name}: {_line(port / 'rate')}, {_line(port / 'state')}"
        for port in ports
    )


def findings(hardware: Hardware) -> list[Finding]:
    """Say what of the hardware slows a ring down or breaks it."""
    gpus = hardware.gpus
    found = []
    if len({(gpu.name, round(gpu.memory_gib)) for gpu in gpus}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in gpus}))
        text = f"the GPUs differ ({names}): every step waits for the slowest"
        found.append(Finding("unequal-gpus", Level.WARNING, text))
    if any(gpu.is_mig for gpu in gpus):
        text = "GPUs are cut up (MIG): their parts have no links to each other"
        found.append(Finding("mig", Level.WARNING, text, "nvidia-smi -mig 0"))
    apart = [pair for pair, link in hardware.links.items() if "between CPU sockets" in link]
    if apart:
        text = f"{len(apart)} pairs of GPUs reach each other only between CPU sockets"
        found.append(Finding("far-gpus", Level.WARNING, text))
    return found


def _gpu(nvml: Any, handle: Any) -> Gpu:
    links = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if _is_up(nvml, handle, link)]
    kinds = {_asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, n) for n in links}
    generation = _asked(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
    width = _asked(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    mig = _asked(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return Gpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30,
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        pcie=f"PCIe {generation} x{width}" if generation and width else "",
        nvlinks=len(links),
        to_switch=nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH in kinds,
        is_mig=bool(mig) and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE,
    )


def _is_up(nvml: Any, handle: Any, link: int) -> bool:
    state = _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
    return bool(state == nvml.NVML_FEATURE_ENABLED)


def _link(nvml: Any, one: Any, other: Any) -> str:
    """By what two GPUs are joined: NVLink where peers can use it, else the way over PCIe."""
    status = _asked(nvml, nvml.nvmlDeviceGetP2PStatus, one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == nvml.NVML_P2P_STATUS_OK:
        return f"NVLink{_direct(nvml, one, other)}"
    level = _asked(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, one, other)
    ways = {getattr(nvml, name): text for name, text in _ANCESTORS}
    return f"PCIe, {ways.get(level, 'unknown')}"


def _direct(nvml: Any, one: Any, other: Any) -> str:
    """Count the links that lead straight to the other GPU."""
    there = _text(nvml.nvmlDeviceGetPciInfo(other).busId)
    remote = [
        _asked(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, one, link)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        if _is_up(nvml, one, link)
    ]
    count = sum(info is not None and _text(info.busId) == there for info in remote)
    return f" x{count}" if count else " by a switch"


def _asked(nvml: Any, function: Any, *arguments: Any) -> Any:
    """What the driver answers; None for a question that this GPU does not know."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def describe(hardware: Hardware) -> Sequence[str]:
    """Return the section's lines."""
    lines = [hardware.missing] if hardware.missing else [f"driver {hardware.driver}"]
    for i, gpu in enumerate(hardware.gpus):
        capability = ".".join(map(str, gpu.capability))
        nvlinks = f"{gpu.nvlinks} NVLinks{' to a switch' if gpu.to_switch else ''}"
        lines.append(
            f"GPU {i}: {gpu.name}, {gpu.memory_gib:.0f} GiB, compute capability {capability}, "
            f"{gpu.pcie}, {nvlinks}{', MIG' if gpu.is_mig else ''}"
        )
    kinds: dict[str, list[str]] = {}
    for pair, link in hardware.links.items():
        kinds.setdefault(link, []).append(pair)
    lines += [f"{link}: {' '.join(pairs)}" for link, pairs in kinds.items()]
    return [*lines, *(hardware.network or ("no InfiniBand or RoCE port",))]
