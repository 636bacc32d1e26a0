"""Says what a layout made for documents of every length does: work, bytes, time.

python scripts/docs/balance.py

Writes the table of some situations in docs/masks.md, and all into docs/balance.csv.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from pages import fill, parser, table, write_csv

from megatron_burst.config import BurstConfig
from megatron_burst.plans.balance.balanced import balanced, imbalance
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import choose_grid
from megatron_burst.plans.visibility.layout import Layout, zigzag
from megatron_burst.plans.visibility.mask import Mask

PAGE = Path(__file__).parents[2] / "docs" / "masks.md"
ALL = PAGE.with_stem("balance")
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "mean 1k": lambda draw: draw.expovariate(1 / 1024),
    "mean 2k": lambda draw: draw.expovariate(1 / 2048),
    "mean 8k": lambda draw: draw.expovariate(1 / 8192),
    "mean 30k": lambda draw: draw.expovariate(1 / 30720),
    "lognormal": lambda draw: draw.lognormvariate(6.93, 1.5),
}
TOKENS, RANKS = (2**17, 2**18, 2**19, 2**20), (8, 16, 64)
PLACES, HEADS = {"8 a node": 8, "one node": 2**20}, {"32:32": 32, "32:4": 4}
DRAWS = (1, 2, 3)
SHOWN = {"mean 1k", "mean 30k", "lognormal", "128k", "1024k", "64"}
COLUMNS = ("documents", "tokens", "ranks", "zigzag", "balanced", "8 a node 32:32", "8 a node 32:4")
type Row = Mapping[str, str]


def documents(lengths: str, tokens: int, seed: int) -> Mask:
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        borders.append(min(tokens, borders[-1] + max(1, round(LENGTHS[lengths](draw)))))
    return Mask.causal(documents=borders)


def bottleneck(layout: Layout, mask: Mask, nodes: Sequence[int], kv_heads: int) -> int:
    """The bytes that the plans of a layer put on the bottleneck link."""
    shape, config = (
        Shape(layout.local_tokens, 32, kv_heads, 128, 128, 2, 4, sends_raw=True),
        BurstConfig(),
    )
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    choice = choose(config, Tiling(layout, mask), grid, shape, nodes)
    return choice.forward[0].cost.bottleneck + choice.backward[0].cost.bottleneck


def row(lengths: str, tokens: int, ranks: int, draw: int = 1) -> Row:
    """One situation, as the CSV has it."""
    mask, usual, sent = documents(lengths, tokens, draw), zigzag(tokens, ranks), {}
    uneven, milliseconds = 0.0, 0.0
    for (place, a_node), (heads, kv_heads) in product(PLACES.items(), HEADS.items()):
        nodes = [rank // a_node for rank in range(ranks)]
        started = time.process_time()
        best = balanced(mask, tokens, nodes, 32 // kv_heads)
        milliseconds = max(milliseconds, 1e3 * (time.process_time() - started))
        uneven = max(uneven, best.imbalance)
        before, now = (bottleneck(x, mask, nodes, kv_heads) for x in (usual, best.layout))
        case = f"{place} {heads}"
        sent |= {
            case: f"{now / max(1, before):.2f}",
            f"{case} zigzag": before,
            f"{case} balanced": now,
        }
    return {
        "documents": lengths,
        "tokens": f"{tokens // 1024}k",
        "ranks": str(ranks),
        "draw": str(draw),
        "zigzag": f"{imbalance(usual, mask):.2f}",
        "balanced": f"{uneven:.3f}",
        "chunk": str(best.chunk),
        "ms": f"{milliseconds:.1f}",
        **{name: str(value) for name, value in sent.items()},
    }


def ratios(rows: Sequence[Row]) -> list[float]:
    """All bytes of these situations over those under zigzag."""
    cases = [f"{place} {heads}" for place in PLACES for heads in HEADS]
    return [
        int(row[f"{case} balanced"]) / max(1, int(row[f"{case} zigzag"]))
        for row in rows
        for case in cases
    ]


def parts(rows: Sequence[Row]) -> dict[str, str]:
    """What the page has of them."""
    first = [each for each in rows if each["draw"] == "1"]
    shown = [each for each in first if each["documents"] in SHOWN and each["tokens"] in SHOWN]
    shown = [each for each in shown if each["ranks"] in SHOWN]
    sent = ratios(first)
    every = [ratios([row for row in rows if row["draw"] == str(draw)]) for draw in DRAWS]
    above = ", ".join(str(sum(x > 1 for x in of)) for of in every)
    words = (
        f"In {len(DRAWS)} draws {above} of {len(sent)} such figures are above 1, at most "
        f"{max(map(max, every)):.2f}."
    )
    cells = table(COLUMNS, ([each[c] for c in COLUMNS] for each in shown))
    return {"table": f"{cells}\n\n{words}"}


if __name__ == "__main__":
    parser(__doc__).parse_args()
    situations = [row(*case) for case in product(LENGTHS, TOKENS, RANKS, DRAWS)]
    write_csv(ALL, situations)
    fill(PAGE, parts(situations))
