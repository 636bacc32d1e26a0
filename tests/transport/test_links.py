"""The machine that plans are chosen for, of what the system says. (fast tier)"""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_burst.plans.choice.machine import CPU, H100, MACHINES, Machine
from megatron_burst.transport import links
from megatron_burst.transport.links import machine_here, rate_between
from tests.workers import Team, WorkerPool


def test_nics_are_as_fast_as_their_ports_and_slow_where_none_is_known(tmp_path: Path) -> None:
    assert machine_here(sysfs=tmp_path).nic_rate == 0.9 * 10e9 / 8 < H100.nic_rate / 8
    for name in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert machine_here(sysfs=tmp_path).nic_rate == H100.nic_rate


def test_ranks_that_see_one_gpu_each_share_the_nics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"is_available": True, "get_device_name": "NVIDIA B200", "device_count": 1}
    for name, value in found.items():
        monkeypatch.setattr(links.torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(links, "fastest_ports", lambda _: {"mlx5_0": 400, "mlx5_1": 400})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine_here(sysfs=tmp_path) == replace(MACHINES["B200"], gpus_per_nic=4)


def slow_here(team: Team) -> tuple[float | None, float | None, Machine]:
    """Of two nodes and of one; and the machine with slow links, kernel calls taking a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links.time, "perf_counter", itertools.count(step=2).__next__)
        rates = rate_between(team.group, "aab"), rate_between(team.group, "aaa")
    assert machine_here(1e9) == machine_here(), "loopback is no network: plans are a GPU's"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links.time, "thread_time", itertools.count().__next__)
        patch.setattr(links.os, "cpu_count", lambda: 4)
        patch.setenv("LOCAL_WORLD_SIZE", "16")
        return *rates, machine_here(25e6)


def test_cpus_with_slow_links_between_nodes_choose_for_what_they_are(workers: WorkerPool) -> None:
    found = workers.run(3, slow_here)
    assert [rate is not None for rate, *_ in found] == [True, False, True], "who takes part"
    assert found[0][0] == 0.95 * 2**20, "2 MiB in 2 s"
    assert all(of_one is None for _, of_one, _ in found)
    pace = 4 / 16 * 4 * 512**2 * 8 * 64 / links.CPU_KERNEL_RATE
    expected = replace(CPU.at_pace(pace, of_memory=1.0), nic_rate=25e6)
    assert {machine for *_, machine in found} == {expected}
    assert expected.forward_rate == pytest.approx(CPU.forward_rate * pace)
