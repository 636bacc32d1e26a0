"""One rank of the stage `ranks`, started by torchrun: the first prints what they found as JSON.

Words: cuda or cpu, the backend, how many SMs flash3 leaves, and perhaps "compare".
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.attention.context import BurstContext
from megatron_burst.config import BurstConfig
from megatron_burst.kernels import Request, select_kernel
from megatron_burst.kernels.flash3 import Flash3Kernel
from megatron_burst.plans.visibility.band import Band
from megatron_burst.tools import verify
from megatron_burst.tools.gpu_check.memory import counted_layer
from megatron_burst.tools.gpu_check.stage import DTYPE, Device
from megatron_burst.tools.one_rank import OneCall, OneRank, Sizes, silent_rank

_RUNS = {
    "as two nodes": "--algorithm burst ring allgather ulysses --gpus-per-node {half} "
    "--mask causal window documents blocks",
    "heads and a ring": "--head-parallel-size 2 --sink",
}
_SIZES = "--dtype bfloat16 --heads 16 --kv-heads 8 --head-dim 128 --tokens-per-rank 512"
_SMALL = "--dtype float32 --heads 4 --kv-heads 2 --head-dim 8 --tokens-per-rank 16"

type Context = Callable[[BurstConfig], BurstContext]


def main(words: list[str]) -> None:
    """Join the others, measure, and print."""
    kind, backend, margin, *compares = words
    Flash3Kernel.sms_for_messages = int(margin)
    device = Device(torch.device(kind), Path())
    if device.is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend)
    report: dict[str, Any] = {}
    if backend == "nccl" or not device.is_gpu:
        report = measure(device, BurstContext.create)
    if compares:
        report["results"] = {name: _compare(device, flags) for name, flags in _RUNS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(report))
    dist.destroy_process_group()


def _compare(device: Device, flags: str) -> Any:
    """Return what `verify` prints of the ranks; it finds them joined, and lets them share a GPU."""
    shape = flags.format(half=dist.get_world_size() // 2), _SIZES if device.is_gpu else _SMALL
    with redirect_stdout(io.StringIO()) as said:
        how = f"--json --backend gloo --device {device.device.type}"
        verify.main(f"{how} {' '.join(shape)}".split())
    return json.loads(said.getvalue() or "null")


def measure(device: Device, create: Context) -> dict[str, Any]:
    """Return the figures of bare messages and of layers of kv rings without grouped heads."""
    sizes = Sizes(16384, 32, 32, 128) if device.is_gpu else Sizes(32, 4, 4, 16)
    context = create(BurstConfig())  # its group has every rank
    topologies = ("flat", "mesh") if context.ranks > 3 else ("flat",)
    layers = {f"kv ring, {t}": _layers(device, sizes, t, create, context.ranks) for t in topologies}
    return {"messages": _rates(device, sizes, context.group), "layers": layers}


def _rates(device: Device, sizes: Sizes, group: Any) -> dict[str, float]:
    """Time K and V on their way to the next rank, alone and beside a tile that takes longer."""
    before, behind = (
        dist.get_global_rank(group, (group.rank() + n) % group.size()) for n in (-1, 1)
    )
    tensors = sizes.draw(device.device, DTYPE)
    sent, arrived = (torch.stack(tensors[1:3]) for _ in range(2))
    request = Request(device.device, DTYPE, *sizes[1:], sizes.head_dim)
    tile = OneCall(select_kernel("auto", request), tensors, Band.FULL, leaves_room=True).forward

    def exchange() -> None:
        received = dist.P2POp(dist.irecv, arrived, before, group)
        posted = dist.P2POp(dist.isend, sent, behind, group)
        for work in dist.batch_isend_irecv([received, posted]):
            work.wait()

    rates = {"bytes": sent.nbytes, "tile": device.seconds(tile), "alone": device.seconds(exchange)}
    for name, is_first in (("before", True), ("in", False)):
        dist.barrier(group)
        rates[name], rates[f"tile, {name}"] = _beside(device, exchange, tile, is_first)
    return rates


def _beside(
    device: Device, exchange: Callable[[], None], tile: Callable[[], object], is_first: bool
) -> tuple[float, float]:
    """Return the seconds until the messages have landed, and until the tile is through."""
    side = torch.cuda.stream(torch.cuda.Stream()) if device.is_gpu else nullcontext()
    begin = device.mark()
    if not is_first:
        tile()
    with side:
        exchange()
        landed = device.mark()
    if is_first:
        tile()
    ended = device.mark()
    device.synchronize()
    return device.between(begin, landed), device.between(begin, ended)


def _layers(
    device: Device, sizes: Sizes, topology: str, create: Context, ranks: int
) -> dict[str, float]:
    """Time layers one behind the other, with the host as far ahead as it gets; count memory."""
    settings: dict[str, Any] = {"backward": "kv", "topology": topology}
    nodes, layers = [0] * ranks, 20 if device.is_gpu else 2
    figures = {"alone": _alone(device, sizes, nodes, **settings)}
    device.free()
    figures["before"] = _beside_torch(device)
    rank = OneRank(create(BurstConfig(**settings)), sizes.draw(device.device, DTYPE))
    figures["connected"] = _beside_torch(device)
    _both_passes(rank)
    device.synchronize()
    figures["used"] = _beside_torch(device)
    device.free()
    if device.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    for _ in range(layers):
        _both_passes(rank)
    figures["host"] = (time.perf_counter() - begun) / layers
    device.synchronize()
    figures["layer"] = (time.perf_counter() - begun) / layers
    figures["documented"] = counted_layer(rank, nodes, sizes, **settings)
    if device.is_gpu:
        figures["reserved"] = torch.cuda.max_memory_reserved()
        figures["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return figures


def _alone(device: Device, sizes: Sizes, nodes: list[int], **settings: Any) -> float:
    """Time layers that send nothing; their tensors go with them."""
    rank = silent_rank(nodes, sizes.draw(device.device, DTYPE), **settings)
    return device.seconds(partial(_both_passes, rank), 3)


def _both_passes(rank: OneRank) -> None:
    rank.forward()
    rank.backward()


def _beside_torch(device: Device) -> int:
    """Return the bytes of the GPU that torch's allocator does not have, as communicators' are."""
    if not device.is_gpu:
        return 0
    free, whole = torch.cuda.mem_get_info()
    return whole - free - torch.cuda.memory_reserved()


if __name__ == "__main__":
    main(sys.argv[1:])
