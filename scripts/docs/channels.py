"""What NCCL makes of plans: the second table of docs/budgets.md, which budgets.py writes."""

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
from megatron_burst.plans.schedules.plan import Kind  # noqa: E402
from megatron_burst.plans.schedules.tiles import Tiling  # noqa: E402
from megatron_burst.tools.plan import timing  # noqa: E402
from megatron_burst.tools.plan.communicators import Options, Use, Way, uses  # noqa: E402
from megatron_burst.tools.plan.configs import Configs  # noqa: E402
from megatron_burst.tools.plan.workload import Workload  # noqa: E402

TOKENS = 8192  # of a rank
HEADS = (256, 64, 16)  # as wide as 32 and 8 of 128, and Ulysses can share them out
RANKS = (8, 64, 256)
WAYS = {
    "flat": BurstConfig(topology="flat", head_chunks=1),
    "double": BurstConfig(topology="double", head_chunks=1),
    "mesh": BurstConfig(topology="mesh", head_chunks=1),
    "ulysses": BurstConfig(algorithm="ulysses"),
    "direct": BurstConfig(topology="double", head_chunks=1),
}
GROUPS = {
    "all ranks": Options(own=False, max_ctas=64),
    "own": Options(max_ctas=64),
    "own, 8 CTAs": Options(),
}


def channels() -> str:
    """Return the table."""
    return table(["ranks", "way", "messages", "of MiB", *GROUPS], _lines())


def _lines() -> Iterator[list[str]]:
    for ranks, (name, config) in product(RANKS, WAYS.items()):
        if name == "double" and ranks == 8:
            continue  # of one node it is flat
        load = attention_alone(Configs.read().cluster("h100"), ranks, TOKENS, config, HEADS)
        found = [_uses(load, options, is_direct=name == "direct") for options in GROUPS.values()]
        some = found[0].values()
        cells = [str(ranks), name, str(sum(use.sent for use in some))]
        cells.append(f"{max(use.largest for use in some) / 2**20:.3g}")
        yield cells + [*map(_cell, found)]


def _uses(load: Workload, options: Options, *, is_direct: bool) -> dict[tuple[str, Way], Use]:
    if is_direct:
        load = replace(load, window=3 * TOKENS)
        schedule = Direct(Tiling(load.ring.layout, load.ring.mask), load.ring.grid, Kind.KV)
        return dict(uses(load.ring, (schedule, schedule), load.ring.shape, options))
    choice, shape = timing.chosen(load.ring)
    schedules = choice.forward[0].schedule, choice.backward[0].schedule
    return dict(uses(load.ring, schedules, shape, options))


def _cell(of: dict[tuple[str, Way], Use]) -> str:
    """Channels of the largest message, of a row of the grid and of others; SMs; MiB."""
    most = [max((u.channels for (_, w), u in of.items() if w is way), default=0) for way in Way]
    channels = "/".join(map(str, filter(None, most)))
    ctas, buffers = (sum(getattr(u, n) for u in of.values()) for n in ("ctas", "buffers"))
    return f"{channels}, {ctas}, {buffers // 2**20}"
