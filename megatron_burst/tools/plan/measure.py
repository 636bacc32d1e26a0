"""Measures the rates of the machine at hand and writes them as a cluster file."""

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_burst.config import BurstConfig, Topology
from megatron_burst.kernels import Request, select_kernel
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.band import Band
from megatron_burst.tools import hardware
from megatron_burst.tools.flops import attention_flops, peak_tflops
from megatron_burst.tools.gpu_check.stage import Device
from megatron_burst.tools.one_rank import OneCall, Sizes
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.replacing import write_text
from megatron_burst.tools.verify import start
from megatron_burst.transport.groups import Groups, make_groups, nodes_of_ranks
from megatron_burst.transport.objects import gather_objects
from megatron_burst.transport.warm_up import Connections


def write(path: str) -> None:
    """Measure and write a file that `--cluster` reads; its one table has the file's name.

    Raises:
        ValueError: the file's name does not end in .toml, or its folder is missing.
    """
    if not path.endswith(".toml"):
        raise ValueError(f"--measure {path}: a cluster file ends in .toml")
    has_ranks = dist.is_initialized() or "RANK" in os.environ
    if not Path(path).parent.is_dir():  # before it takes time
        raise ValueError(f"--measure {path}: there is no folder {Path(path).parent}")
    if torch.cuda.device_count() > 1 and not has_ranks:
        raise ValueError(
            f"--measure {path}: messages are timed between ranks, of which there is one: torchrun "
            f"--nproc-per-node gpu -m megatron_burst plan --measure {path}, on all nodes if several"
        )
    joins, device = not dist.is_initialized(), start()
    text = cluster_file(Path(path).stem, device)
    if not has_ranks or dist.get_rank() == 0:
        write_text(Path(path), text)
        print(f"wrote {path}: look at its links, then megatron-burst plan --cluster {path}")
    if has_ranks and joins:
        dist.destroy_process_group()


def cluster_file(name: str, device: torch.device) -> str:
    """Return the text of a cluster file with what this machine sustains; of all ranks if any."""
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        gpus, model = torch.cuda.device_count(), torch.cuda.get_device_name()
        memory, whose = torch.cuda.get_device_properties(device).total_memory, "of a GPU"
    else:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        gpus, model = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), hardware.cpu_model()
        memory, whose = of_host // gpus, "a rank's share of the host: no GPU is here"
    how = f"{model}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    nics = [rate / 8 for rate in hardware.fastest_ports().values()]
    nics_per_node = max(1, min(gpus, len(nics)))
    rates = measured(device)
    known = {"within_gb_s": (rates["memory_gb_s"], "estimate", "one device alone")}
    known["nic_gb_s"] = 0.9, "estimate", "no port says its rate"
    if nics:
        known["nic_gb_s"] = 0.9 * nics[0], "data sheet", "what its ports say"
    if dist.is_initialized():
        rates |= message_rates(Device(device, Path()), nics_per_node)
    known |= {rate: (value, "measured", how) for rate, value in rates.items()}
    lines = [
        "# Written by megatron-burst plan --measure.",
        f"[{json.dumps(name)}]",
        *_of_gpu(model, rates["linear_tflops"]),
        f"gpus_per_node = {gpus}",
        f"nics_per_node = {nics_per_node}",
        f"memory_gib = {memory / 2**30:.1f}  # {whose}",
        f"host_gib = {of_host / 2**30:.1f}",
        f"\n[{json.dumps(name)}.rates]",
    ]
    for rate, (value, *source) in known.items():
        lines.append(f"{rate} = [{value:.5g}, {', '.join(map(json.dumps, source))}]")
    return "\n".join(lines) + "\n"


def _of_gpu(model: str, linear_tflops: float) -> list[str]:
    """Return the lines of what nothing here measures: peak, FP8, NVLinks, channels of NCCL."""
    if (name := Configs.read().with_gpu(model)) and not re.search("PCIe|NVL", model):
        return [f'base = "{name}"  # for what is not measured: peak, FP8, NVLinks, channels']
    peak, how = peak_tflops(model), "data sheet"
    if peak is None:
        peak, how = 1.5 * linear_tflops, "made up: 1.5 x linear_tflops"
    unknown = "# NCCL's memory is not counted without nvlinks, channels and channel_gb_s."
    return [unknown, f"peak_tflops = {peak:.5g}  # {how}"]


def measured(device: torch.device) -> dict[str, float]:
    """Return what the device sustains: attention, matrix products, copies.

    Each lets its tensors go before the next begins. Attention is a full tile, by the kernel that
    training would take.
    """
    timed = Device(device, Path())
    return {**_attention(timed), **_products(timed), **_copies(timed)}


def _attention(timed: Device) -> dict[str, float]:
    dtype = _dtype(timed)
    sizes, dims = Sizes(16384 if timed.is_gpu else 512, 16, 16, 128), (16, 128, 128)
    kernel = select_kernel("auto", Request(timed.device, dtype, 16, *dims))
    one = OneCall(kernel, sizes.draw(timed.device, dtype), Band.FULL)
    forward = attention_flops(one.pairs, *dims) / timed.seconds(one.forward)
    backward = attention_flops(one.pairs, *dims, backward=True) / timed.seconds(one.backward)
    return {"forward_tflops": forward / 1e12, "backward_tflops": backward / 1e12}


def _products(timed: Device) -> dict[str, float]:
    width = 8192 if timed.is_gpu else 256
    a, b = torch.randn(2, width, width, device=timed.device, dtype=_dtype(timed))
    return {"linear_tflops": 2 * width**3 / timed.seconds(lambda: a @ b) / 1e12}


def _copies(timed: Device) -> dict[str, float]:
    count = 2**30 if timed.is_gpu else 2**24
    source = torch.empty(count, dtype=torch.uint8, device=timed.device)
    target = torch.empty_like(source)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=timed.is_gpu)
    return {
        "memory_gb_s": 2 * count / timed.seconds(lambda: target.copy_(source)) / 1e9,
        "host_gb_s": count / timed.seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9,
    }


def message_rates(timed: Device, nics_per_node: int) -> dict[str, float]:
    """Return what messages sustain between ranks, on the groups that training uses.

    All ranks send to the next one of their node at a time, and then to the next node's: the slowest
    says the rate of a GPU, and of a NIC. A collective call of the whole job.

    Raises:
        ValueError: the nodes have unequal numbers of ranks, so that no group is of a node's.
    """
    assert (world := dist.group.WORLD) is not None
    nodes = nodes_of_ranks(world, seconds := BurstConfig().timeout_seconds)
    grid, why_flat = choose_grid(Topology.DOUBLE, nodes)
    if why_flat:
        raise ValueError(f"--measure: {why_flat}")
    groups = make_groups(world, grid, head_groups(nodes, 1), nodes.count(nodes[0]), seconds)
    Connections(groups.channels, {}).make()
    node, place = grid.coordinates(world.rank())
    rates = {}
    if grid.ranks_per_node > 1:
        ends = grid.at(node, place + 1), grid.at(node, place - 1)
        rates["within_gb_s"] = _rate(timed, groups, Channel.READ_WITHIN, *ends)
    if grid.nodes > 1:
        ends = grid.at(node + 1, place), grid.at(node - 1, place)
        of_gpu = _rate(timed, groups, Channel.READ_BETWEEN, *ends)
        rates["nic_gb_s"] = of_gpu * grid.ranks_per_node / nics_per_node
    return rates


def _rate(timed: Device, groups: Groups, channel: Channel, target: int, source: int) -> float:
    """Send to one rank while receiving from another; return the slowest rank's GB/s."""
    group, count = groups.channels[channel], 2**28 if timed.is_gpu else 2**18
    sent, arriving = torch.empty(2, count, dtype=torch.uint8, device=timed.device)

    def move() -> None:
        receive = dist.P2POp(dist.irecv, arriving, source, group)
        for work in dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, sent, target, group)]):
            work.wait()

    seconds, limit = timed.seconds(move), BurstConfig().timeout_seconds
    return count / max(gather_objects(groups.agreement, "compare rates", seconds, limit)) / 1e9


def _dtype(timed: Device) -> torch.dtype:
    return torch.bfloat16 if timed.is_gpu else torch.float32
