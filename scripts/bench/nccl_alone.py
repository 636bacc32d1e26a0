#!/usr/bin/env python
"""Runs one rank's plan over NCCL on one GPU: every message goes to this rank itself.

    PYTHONPATH=. python scripts/bench/nccl_alone.py
    PYTHONPATH=. python scripts/bench/nccl_alone.py --recorded

Results are wrong, for what arrives is the rank's own; messages, streams, memory and the host's work
are those of a ring, but copies within a GPU take its multiprocessors, as NVLink does not. A line of
JSON a ring: a layer without messages and with them, MiB and ms, all layers one behind the other.
"""

import argparse
import datetime
import json
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_burst.config import BurstConfig
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.plan import Kind, Send
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.tools.gpu_check.memory import counted_layer
from megatron_burst.tools.gpu_check.stage import DTYPE
from megatron_burst.tools.one_rank import OneRank, Sizes, context_of, silent_rank
from megatron_burst.transport import memory
from megatron_burst.transport.comm import Communicator, Posted
from megatron_burst.transport.groups import members_of_channels
from megatron_burst.transport.lowered import Batch
from megatron_burst.transport.nccl import loaded, options_like

NODE = 8  # ranks
RINGS: Sequence[tuple[int, Mapping[str, str], Sizes, int]] = (  # ranks, settings, sizes, layers
    (8, {"backward": "kv", "topology": "flat"}, Sizes(32768, 32, 32, 128), 20),
    (8, {"backward": "query", "topology": "flat"}, Sizes(32768, 32, 8, 128), 10),
    (8, {"backward": "kv", "topology": "flat"}, Sizes(8192, 32, 8, 128), 30),
    (8, {"backward": "kv", "topology": "flat"}, Sizes(4096, 32, 32, 128), 40),
    (64, {"backward": "kv", "topology": "double"}, Sizes(8192, 32, 32, 128), 8),
)


class ToItself(Communicator):
    """Sends every message to this rank; what is sent at a time is as large as what arrives."""

    def start(self, batch: Batch, own: Mapping[Kind, torch.Tensor], memory: torch.Tensor) -> Posted:
        sizes: tuple[list[int], list[int]] = ([], [])
        for message in batch.messages if batch.ready is None else ():
            size = message.bytes(own, memory).nbytes
            sizes[isinstance(message.transfer, Send)].append(size)
        if sizes[0] != sizes[1]:  # as a mesh has them: NCCL, which pairs them, would wait for ever
            raise ValueError(f"{batch}: receives {sizes[0]} bytes, sends {sizes[1]}")
        return super().start(batch, own, memory)


def rank_of(nodes: Sequence[int], sizes: Sizes, settings: Mapping[str, str]) -> OneRank:
    """Return the rank in the middle, its channels NCCL's groups of this process alone."""
    config = BurstConfig(**settings)
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    limit, channels = datetime.timedelta(minutes=1), {}
    for channel in members_of_channels(grid, head_groups(nodes, 1)):
        options = options_like((), limit, max_ctas=8)
        channels[channel] = dist.new_group([0], pg_options=options)
        dist.all_reduce(torch.ones(1, device="cuda"), group=channels[channel])  # which makes it
    carried = ToItself([0] * len(nodes), channels, limit.total_seconds())
    context = context_of(len(nodes) // 2, nodes, config, carried)
    return OneRank(context, sizes.draw("cuda", DTYPE))


def layers(one: OneRank, number: int) -> dict[str, float]:
    """Run both passes so often, the host as far ahead as it gets."""
    for _ in range(2):
        one.backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    begun = time.perf_counter()
    for _ in range(number):
        one.forward()
        one.backward()
    host = time.perf_counter() - begun
    torch.cuda.synchronize()
    return {
        "host_ms": 1e3 * host / number,
        "layer_ms": 1e3 * (time.perf_counter() - begun) / number,
        "allocated": torch.cuda.max_memory_allocated() / 2**20,
        "reserved": torch.cuda.max_memory_reserved() / 2**20,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
    }


def measure(
    ranks: int, settings: Mapping[str, str], sizes: Sizes, number: int
) -> dict[str, object]:
    nodes = [rank // NODE for rank in range(ranks)]
    figures: dict[str, object] = {"ranks": ranks, **settings, "sizes": str(sizes)}
    figures["silent"] = layers(silent_rank(nodes, sizes.draw("cuda", DTYPE), **settings), number)
    one = rank_of(nodes, sizes, settings)
    figures["nccl"] = layers(one, number)
    return figures | {"counted": counted_layer(one, nodes, sizes, **settings) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = "let NCCL's group record the tensors of messages, as it does with tensors of torch's own"
    parser.add_argument("--recorded", action="store_true", help=help)
    if parser.parse_args().recorded:
        memory._alias = lambda data: data
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    print(json.dumps({"device": torch.cuda.get_device_name(), "nccl": loaded()}))
    for ring in RINGS:
        print(json.dumps(measure(*ring)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
