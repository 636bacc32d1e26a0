"""What machine this is, as far as plans are chosen by it: what CUDA and the network ports say."""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_burst.plans.choice.machine import H100, MACHINES, Machine
from megatron_burst.transport.ports import SYSFS, fastest_ports

_SUSTAINED = 0.9  # of a port's rate
_ETHERNET = 10  # Gbit/s of a node


def machine_here(sysfs: Path = SYSFS) -> Machine:
    """Return the machine that plans are chosen for: the GPU by its name, an H100 if not known.

    NICs by the rates of InfiniBand or RoCE ports that are up. Without one a node has Ethernet, and
    so slow that the fewest bytes between nodes are the fastest: wrongly taken for slow, links cost
    less than wrongly taken for fast.
    """
    machine, gpus = H100, 1
    if torch.cuda.is_available():
        name, gpus = torch.cuda.get_device_name(), torch.cuda.device_count()
        machine = next((m for word, m in MACHINES.items() if word in name), H100)
    ports = fastest_ports(sysfs)
    rate = _SUSTAINED * 1e9 / 8 * max(ports.values(), default=_ETHERNET)
    return replace(machine, nic_rate=rate, gpus_per_nic=max(1, gpus // max(1, len(ports))))
