"""Times the links between the ranks of a job: within nodes and between them.

The launchers start it on every rank instead of a training (--measure-links). All ranks send to the
next one at the same time, as in a ring: to the next of their node, and to the one of the same
number on the next node. The result is that of the slowest rank, the median of the repetitions.
"""

import argparse
import json
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

SMALL, LARGE = 8, 64 << 20  # bytes
WARM_UP, REPETITIONS = 3, 15


def main() -> None:
    """Be one rank of torchrun's."""
    parser = argparse.ArgumentParser(prog="megatron-burst launch --measure-links")
    parser.add_argument("--output", type=Path, required=True, metavar="JSON")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    device = common_device()
    group = dist.new_group(backend="nccl") if device.type == "cuda" else None
    text = json.dumps(measure(LARGE, device, group), indent=2)
    if dist.get_rank() == 0:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(f"{text}\n")
        print(text)
    dist.destroy_process_group()


def common_device() -> torch.device:
    """Return what all ranks measure on: their GPUs, or the CPU where no rank has one.

    Raises:
        SystemExit: some have a GPU and some have not; the message names their nodes.
    """
    on_gpu = torch.cuda.is_available() and os.environ.get("MEGATRON_BURST_CPU") != "1"
    found: list[tuple[bool, str]] = [(False, "")] * dist.get_world_size()
    dist.all_gather_object(found, (on_gpu, platform.node()))
    lacking = sorted({node for has_one, node in found if not has_one})
    if any(has_one for has_one, _ in found) and lacking:
        sys.exit(
            f"links: no GPU on {', '.join(lacking)}, but on others; MEGATRON_BURST_CPU=1 "
            "measures the CPUs of all"
        )
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda" if on_gpu else "cpu")


def measure(
    size: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, object]:
    """Return what the links carry, of all ranks' the slowest; `group` sends, default: gloo's."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank - rank % local
    result: dict[str, object] = {"backend": dist.get_backend(group), "ranks": world}
    result |= {"ranks_per_node": local, "bytes": size}
    steps = {"within_nodes": [first + (rank - first + s) % local for s in (1, -1)]}
    steps["between_nodes"] = [(rank + s * local) % world for s in (1, -1)]
    for name, (target, source) in steps.items():
        if target == rank:  # a single rank on the node, or a single node
            continue
        latency, seconds = (
            _exchange(torch.zeros(n, dtype=torch.uint8, device=device), target, source, group)
            for n in (SMALL, size)
        )
        result[f"{name}_gbit_per_s"] = round(8e-9 * size / seconds, 3)
        result[f"{name}_latency_us"] = round(1e6 * latency, 1)
    return result


def _exchange(
    sent: torch.Tensor, target: int, source: int, group: dist.ProcessGroup | None
) -> float:
    """Return what the slowest rank takes, in seconds, to send to one rank and hear from another."""
    received = torch.empty_like(sent)
    transfers = [
        dist.P2POp(dist.irecv, received, source, group),
        dist.P2POp(dist.isend, sent, target, group),
    ]
    times = []
    for _ in range(WARM_UP + REPETITIONS):
        dist.barrier(group)
        _synchronize(sent)
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        _synchronize(sent)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(median(times[WARM_UP:]), dtype=torch.float64, device=sent.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    return slowest.item()


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
