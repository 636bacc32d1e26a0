"""What NCCL makes of plans: the table of docs/design/nccl.md, which budgets.py writes."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from pages import table
from rows import attention_alone

sys.path.append(str(Path(__file__).parents[2]))

from megatron_burst.config import BurstConfig  # noqa: E402
from megatron_burst.plans.schedules.direct import Direct  # noqa: E402
from megatron_burst.plans.schedules.plan import Channel, Kind  # noqa: E402
from megatron_burst.plans.schedules.tiles import Tiling  # noqa: E402
from megatron_burst.tools.plan import timing  # noqa: E402
from megatron_burst.tools.plan.communicators import Use, uses  # noqa: E402
from megatron_burst.tools.plan.configs import Configs  # noqa: E402
from megatron_burst.tools.plan.workload import Workload  # noqa: E402

TOKENS = 8192  # of a rank
HEADS = (256, 64, 16)  # as wide as 32 and 8 of 128, and Ulysses can share them out
PLACES = (("h100", 8), ("h100", 64), ("gb200", 64))
WAYS = {
    "flat": BurstConfig(topology="flat", head_chunks=1),
    "double": BurstConfig(topology="double", head_chunks=1),
    "mesh": BurstConfig(topology="mesh", head_chunks=1),
    "ulysses": BurstConfig(algorithm="ulysses"),
    "direct": BurstConfig(topology="double", head_chunks=1),
}


def channels() -> str:
    """Return the table."""
    return table(["GPUs", "way", "messages", "of MiB", "channels, SMs, MiB"], _lines())


def _lines() -> Iterator[list[str]]:
    for (name_of, ranks), (name, config) in product(PLACES, WAYS.items()):
        cluster = Configs.read().cluster(name_of)
        if name == "double" and ranks == cluster.gpus_per_node:
            continue  # of one node it is flat
        load = attention_alone(cluster, ranks, TOKENS, config, HEADS)
        by_channel = _uses(load, is_direct=name == "direct")
        sent = str(sum(use.sent for use in by_channel.values()))
        largest = f"{max(use.largest for use in by_channel.values()) / 2**20:.3g}"
        yield [f"{ranks} {cluster.name.upper()}", name, sent, largest, _cell(by_channel)]


def _uses(load: Workload, *, is_direct: bool) -> dict[Channel, Use]:
    if is_direct:
        load = replace(load, window=3 * TOKENS)
        schedule = Direct(Tiling(load.ring.layout, load.ring.mask), load.ring.grid, Kind.KV)
        return dict(uses(load.ring, (schedule, schedule), load.ring.shape))
    choice, shape = timing.chosen(load.ring)
    schedules = choice.forward[0].schedule, choice.backward[0].schedule
    return dict(uses(load.ring, schedules, shape))


def _cell(of: dict[Channel, Use]) -> str:
    """Channels of the largest read and gradient in a row of the grid, and of others; SMs; MiB."""
    of_each = {channel: use.channels for channel, use in of.items()}
    rows = [(Channel.READ_WITHIN, Channel.READ_ACROSS), (Channel.GRADIENT_WITHIN,)]
    rest = [channel for channel in Channel if not any(channel in row for row in rows)]
    most = [max((of_each.get(channel, 0) for channel in row), default=0) for row in (*rows, rest)]
    channels = "/".join(map(str, filter(None, most)))
    ctas, buffers = (sum(getattr(u, n) for u in of.values()) for n in ("ctas", "buffers"))
    return f"{channels}, {ctas}, {buffers // 2**20}"
