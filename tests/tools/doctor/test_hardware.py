"""GPUs and links as nvidia-ml-py tells them, by a stand-in with its names. (fast tier)"""

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_burst.tools.doctor import hardware


class Missing(Exception):
    """What the driver says to a question that it does not know."""


class Nvml:
    """Two GPUs behind one NVSwitch and a third one on another socket without NVLink."""

    NVMLError = Missing
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
    NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50

    def __init__(self, direct: bool = False) -> None:
        self.is_open, self.direct = False, direct

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA H200" if handle < 2 else b"NVIDIA A10"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=141 * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [9, 0] if handle < 2 else [8, 6]

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle == 2:
            raise Missing("not supported")
        return [0, 0]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if handle == 2 or link >= 18:
            raise Missing("not supported")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0 if self.direct else 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=f"bus{1 - handle}".encode() if self.direct else b"switch")

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"bus{handle}".encode())

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0 if 2 not in (one, other) else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50


def test_gpus_and_links(tmp_path: Path) -> None:
    nvml = Nvml()
    found = hardware.read(nvml, tmp_path)
    assert not nvml.is_open and not found.missing and found.driver == "580.1"
    first, _, third = found.gpus
    assert (first.name, first.memory_gib, first.capability) == ("NVIDIA H200", 141, (9, 0))
    assert (first.pcie, first.nvlinks, first.to_switch) == ("PCIe 5 x16", 18, True)
    assert (third.nvlinks, third.is_mig) == (0, False)
    far = "PCIe, between CPU sockets"
    assert found.links == {"0-1": "NVLink by a switch", "0-2": far, "1-2": far}
    assert [f.check for f in hardware.findings(found)] == ["unequal-gpus", "far-gpus"]
    lines = "\n".join(hardware.describe(found))
    assert "18 NVLinks to a switch" in lines and f"{far}: 0-2 1-2" in lines


def test_direct_links_are_counted(tmp_path: Path) -> None:
    assert hardware.read(Nvml(direct=True), tmp_path).links["0-1"] == "NVLink x18"


def test_no_driver_and_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(Missing("no driver")))
    assert "no NVIDIA driver here: no driver" in hardware.read(nvml, tmp_path).missing
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in hardware.read(None, tmp_path).missing


def test_network_ports(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert hardware.network_cards(tmp_path) == ("mlx5_0 port 1: 400 Gb/sec (4X NDR), unknown",)


def names_used() -> set[str]:
    tree = ast.parse(inspect.getsource(hardware))
    written = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "nvml"
    }
    return written | {name for name, _ in hardware._ANCESTORS}


def test_the_stand_in_has_no_other_names_than_are_used() -> None:
    own = {name for name in vars(Nvml) if name.lower().startswith("nvml")}
    assert own == names_used()


def test_the_package_has_every_name() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert [name for name in sorted(names_used()) if not hasattr(pynvml, name)] == []
