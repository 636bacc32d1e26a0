#!/usr/bin/env python3
"""Times the links between the ranks of a job: within nodes and between them.

The launchers start it on every rank instead of a training (--measure-links). All ranks send to the
next one at the same time, as in a ring: to the next of their node, and to the one of the same
number on the next node. The result is that of the slowest rank, the median of the repetitions.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

SMALL, LARGE = 8, 64 << 20  # bytes
WARM_UP, REPETITIONS = 3, 15


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/measure_links.py", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    parser.add_argument(
        "--bytes", type=int, default=LARGE, help="of a message (default %(default)s)"
    )
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and os.environ.get("MEGATRON_BURST_CPU") != "1"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    device = torch.device("cuda" if on_gpu else "cpu")
    result = measure(args.bytes, device)
    if dist.get_rank() == 0:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
    dist.destroy_process_group()


def measure(size: int, device: torch.device) -> dict[str, object]:
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank - rank % local
    result: dict[str, object] = {
        "backend": dist.get_backend(),
        "ranks": world,
        "ranks_per_node": local,
        "bytes": size,
    }
    steps = {"within_nodes": [first + (rank - first + s) % local for s in (1, -1)]}
    steps["between_nodes"] = [(rank + s * local) % world for s in (1, -1)]
    for name, (target, source) in steps.items():
        if target == rank:  # a single rank on the node, or a single node
            continue
        latency = exchange(SMALL, target, source, device)
        seconds = exchange(size, target, source, device)
        result[f"{name}_gbit_per_s"] = round(8e-9 * size / seconds, 3)
        result[f"{name}_latency_us"] = round(1e6 * latency, 1)
    return result


def exchange(size: int, target: int, source: int, device: torch.device) -> float:
    """Seconds that the slowest rank takes to send to one rank while it receives from another."""
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    transfers = [dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, target)]
    times = []
    for _ in range(WARM_UP + REPETITIONS):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(median(times[WARM_UP:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
