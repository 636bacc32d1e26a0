"""GPUs and their links as nvidia-smi writes them down, ports as the kernel does. (fast tier)"""

from pathlib import Path

import pytest

from megatron_burst.tools import hardware
from megatron_burst.tools.doctor import machine
from megatron_burst.tools.hardware import Devices

# Three GPUs, two of them on NVLink, and a network card, as `nvidia-smi topo -m` prints them.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
ROW = "NVIDIA {}, 143771 MiB, 580.1, 700.00 W, 1980 MHz, 9.0, 5, 16, {}\n"


def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: str, topology: str) -> Devices:
    """What is read where nvidia-smi prints this."""
    script = tmp_path / "nvidia-smi"
    (tmp_path / "rows").write_text(rows)
    (tmp_path / "topology").write_text(topology)
    script.write_text(
        f"#!/bin/sh\ncase $1 in topo) cat {tmp_path}/topology ;; *) cat {tmp_path}/rows ;; esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return hardware.read(tmp_path / "sys")


def test_gpus_and_links_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = ROW.format("H200", "Disabled") * 2 + ROW.format("A10", "[N/A]")
    found = here(monkeypatch, tmp_path, rows, TOPOLOGY)
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H200", "NVIDIA H200", "NVIDIA A10"]
    assert (found["gpus"][0]["compute_cap"], found["gpus"][0]["pcie.link.gen.max"]) == ("9.0", "5")
    assert (
        found["links"][1].split()[:4] == ["GPU0", "X", "NV18", "SYS"] and len(found["links"]) == 5
    )
    lines = "\n".join(machine.devices(found))
    assert "GPU 0: NVIDIA H200, memory.total 143771 MiB, driver_version 580.1" in lines
    assert "\nGPU0\t X \tNV18\tSYS" in lines and "\x1b" not in lines and "Legend" not in lines


def test_without_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = hardware.read(tmp_path)
    assert (found["gpus"], found["links"], found["network"]) == ([], [], [])
    assert list(machine.devices(found)) == ["nvidia-smi finds no GPU", "no InfiniBand or RoCE port"]


def test_network_ports_have_a_state_and_a_rate(tmp_path: Path) -> None:
    port = tmp_path / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "net/eth0").mkdir(parents=True)
    (tmp_path / "net/eth0/speed").write_text("25000\n")
    (tmp_path / "net/eth0/operstate").write_text("up\n")
    assert hardware.network(tmp_path) == [
        {"name": "mlx5_0:1", "state": "", "rate": "400 Gb/sec (4X NDR)"},
        {"name": "eth0", "state": "up", "rate": "25000 Mb/s"},
    ]
    assert list(machine.devices({"gpus": [], "links": [], "network": hardware.network(tmp_path)}))[
        1:
    ] == ["mlx5_0:1: 400 Gb/sec (4X NDR), ", "eth0: 25000 Mb/s, up"]


def test_a_node_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    node = hardware.describe("toy", ["a", "b"])
    assert (node["run"], node["command"]) == ("toy", ["a", "b"])
    assert "torch" in node["versions"] and node["settings"]["NCCL_DEBUG"] == "INFO"


def test_it_imports_no_torch_of_its_own() -> None:
    assert "import torch" not in Path(hardware.__file__).read_text()
