"""What machine this is, as far as plans are chosen by it: what CUDA, ports and messages say."""

import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from megatron_burst.plans.choice.machine import CPU, CPU_KERNEL_RATE, H100, MACHINES, Machine
from megatron_burst.transport.backend import is_by_gloo
from megatron_burst.transport.errors import named_errors
from megatron_burst.transport.ports import SYSFS, fastest_ports

_SUSTAINED = 0.9  # of a port's rate
_IN_A_RING = 0.95  # of the rate of a message alone; all ranks send and receive at once there
"""Measured: 0.92 to 1.0 in the median, see scripts/bench/results/cpu_paced.md."""
_ETHERNET = 10  # Gbit/s of a node
_SLOW = 1.3e9 / 8  # bytes/s; no cluster's network is as slow, and loopback only where it is shaped
_MESSAGE, _MESSAGES = 2**21, 6  # bytes, and how many are timed one by one
_TOKENS, _HEADS, _HEAD_DIM = 512, 8, 64  # of a kernel call


def machine_here(between: float | None = None, sysfs: Path = SYSFS) -> Machine:
    """Return the machine that plans are chosen for: the GPU by its name, an H100 if not known.

    NICs by the rates of InfiniBand or RoCE ports that are up. Without one a node has Ethernet, and
    so slow that the fewest bytes between nodes are the fastest: wrongly taken for slow, links cost
    less than wrongly taken for fast.

    Without a GPU plans are an H100's, so that CPUs rehearse them; but where messages between nodes
    were found to be slow, `between` bytes/s, they are those of this CPU.
    """
    if between and between < _SLOW:
        # Copies come while the other ranks of the core wait for messages.
        return replace(CPU.at_pace(_pace(), of_memory=1.0), nic_rate=between)
    machine, gpus = H100, 1
    if torch.cuda.is_available():
        name, ranks = torch.cuda.get_device_name(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = max(torch.cuda.device_count(), ranks)  # a rank may see its own alone
        machine = next((m for word, m in MACHINES.items() if word in name), H100)
    ports = fastest_ports(sysfs)
    rate = _SUSTAINED * 1e9 / 8 * max(ports.values(), default=_ETHERNET)
    return replace(machine, nic_rate=rate, gpus_per_nic=max(1, gpus // max(1, len(ports))))


def rate_between(group: dist.ProcessGroup, nodes: Sequence[Hashable]) -> float | None:
    """Return the bytes/s of a ring's messages to another node; None on GPUs, and on most ranks.

    A collective call of `group`, whose first rank sends the first one of another node a few
    messages: 0.5 s at 200 Mbit/s. The fastest of them, for others may be late for other reasons.
    """
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    if other is None or group.rank() not in (0, other):
        return None
    if torch.cuda.is_available() or not is_by_gloo(group, "cpu"):
        return None
    message, answer = torch.zeros(_MESSAGE, dtype=torch.uint8), torch.zeros(1)
    least = float("inf")
    with named_errors("at the start", "time a message between nodes"):
        for _ in range(_MESSAGES):
            begun = time.perf_counter()
            if group.rank():
                dist.recv(message, group=group, group_src=0)
                dist.send(answer, group=group, group_dst=0)
            else:
                dist.send(message, group=group, group_dst=other)
                dist.recv(answer, group=group, group_src=other)
            least = min(least, time.perf_counter() - begun)
    return _IN_A_RING * _MESSAGE / least


def _pace() -> float:
    """Return how fast this CPU's share of a rank is, over that of `CPU`.

    By the processor's time, which other processes beside it do not lengthen as they do the clock's.
    """
    q = torch.zeros(1, _HEADS, _TOKENS, _HEAD_DIM)
    least = float("inf")
    for _ in range(_MESSAGES):
        begun = time.thread_time()
        scaled_dot_product_attention(q, q, q)
        least = min(least, time.thread_time() - begun)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    share = min(1.0, (os.cpu_count() or 1) / ranks / torch.get_num_threads())
    return share * 4 * _HEADS * _HEAD_DIM * _TOKENS**2 / least / CPU_KERNEL_RATE
