"""The machine that plans are chosen for, of what the system says. (fast tier)"""

from pathlib import Path

from megatron_burst.plans.choice.machine import H100
from megatron_burst.transport.links import machine_here


def test_nics_are_as_fast_as_their_ports_and_slow_where_none_is_known(tmp_path: Path) -> None:
    assert machine_here(sysfs=tmp_path).nic_rate == 0.9 * 10e9 / 8 < H100.nic_rate / 8
    for name in ("mlx5_0", "mlx5_1"):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert machine_here(sysfs=tmp_path).nic_rate == H100.nic_rate
