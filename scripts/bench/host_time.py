#!/usr/bin/env python
"""Times what the host does in a hop of a ring, its calls of torch included: no message, no kernel.

    python scripts/bench/host_time.py [--ranks 8 64] [--backward kv query]

One rank's passes run with a kernel that returns empty tensors and a process group of torch's `fake`
backend, on tensors so small that only calls count. A time is told in those of an `aten.add` of two
numbers in the same round, so that machines and their load compare.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from harness import Flags, empty_kernels, in_turns, origin, publish, seconds, table
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_burst import BurstConfig
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.tools.one_rank import OneRank, Sizes, context_of
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.groups import members_of_channels

NODE = 8  # ranks
SIZES = Sizes(8, 1, 1, 8)
ADDS = 1000  # of a round
PAGE = """# Host time of a hop

How long the host works for a hop, a pass divided by its ranks - 1, in calls of `aten.add`; rounds
in turns, the least of {repetitions}. Nodes of 8 ranks, one head.

{table}
"""


@contextmanager
def one_rank(ranks: int, backward: str) -> Iterator[OneRank]:
    """The rank in the middle, of a group in which nothing is sent."""
    rank = ranks // 2
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        nodes = [number // NODE for number in range(ranks)]
        config = BurstConfig(backward=backward, topology="flat" if ranks <= NODE else "double")
        grid, _ = choose_grid(config.shape_of_rings, nodes)
        wanted = members_of_channels(grid, head_groups(nodes, 1))
        channels = {channel: dist.new_group(list(range(ranks))) for channel in wanted}
        carried = Communicator(range(ranks), channels, 60.0)
        with empty_kernels():
            context = context_of(rank, nodes, config, carried)
            yield OneRank(context, SIZES.draw("cpu", torch.float32))
    finally:
        dist.destroy_process_group()


def adds() -> None:
    x = torch.ones(2)
    for _ in range(ADDS):
        torch.ops.aten.add(x, x)


def measure(ranks: int, backward: str, repetitions: int) -> dict[str, float]:
    """Return how many additions a hop of each pass takes."""
    with one_rank(ranks, backward) as one, torch.no_grad():
        ways = {
            "add": lambda: seconds(adds) / ADDS,
            "forward": lambda: seconds(one.forward) / (ranks - 1),
            "backward": lambda: seconds(one.backward) / (ranks - 1),
        }
        times = in_turns(ways, repetitions)
    of_add = min(times.pop("add"))
    return {"add_us": 1e6 * of_add} | {way: min(each) / of_add for way, each in times.items()}


def main(given: Sequence[str] | None = None) -> None:
    flags = Flags(__doc__)
    flags.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    flags.add_argument("--backward", nargs="+", default=["kv", "query"])
    flags.set_defaults(repetitions=30)
    args, where = flags.read(given), origin()
    rows = [
        {"ranks": ranks, "ring": ring, **measure(ranks, ring, args.repetitions)}
        for ranks in args.ranks
        for ring in args.backward
    ]
    head = ["ring in the backward", "ranks", "forward", "backward", "an addition, µs"]
    lines = [
        [r["ring"], str(r["ranks"]), *(f"{r[w]:.0f}" for w in ("forward", "backward"))]
        + [f"{r['add_us']:.2f}"]
        for r in rows
    ]
    publish(args, "host_time", PAGE, rows, where, table=table(head, lines))


if __name__ == "__main__":
    main(sys.argv[1:])
