"""Says what a layout made for documents of every length does: work, bytes, time.

python scripts/docs/balance.py

Writes docs/balance.md, with a table of some situations, and the .csv of all beside it.
"""

import csv
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path

from megatron_burst.config import BurstConfig
from megatron_burst.plans.balance import balanced, imbalance
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.layout import Layout, zigzag
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import choose
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import choose_grid

PAGE = Path(__file__).parents[2] / "docs" / "balance.md"
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "mean 1k": lambda draw: draw.expovariate(1 / 1024),
    "mean 2k": lambda draw: draw.expovariate(1 / 2048),
    "mean 8k": lambda draw: draw.expovariate(1 / 8192),
    "mean 30k": lambda draw: draw.expovariate(1 / 30720),
    "lognormal": lambda draw: draw.lognormvariate(6.93, 1.5),
}
TOKENS, RANKS = (2**17, 2**18, 2**19, 2**20), (8, 16, 64)
PLACES, HEADS = {"8 a node": 8, "one node": 2**20}, {"32:32": 32, "32:4": 4}
TEXT = """\
# Balanced documents

<!-- written by python scripts/docs/balance.py -->

`--burst-layout balanced` beside zigzag: the largest over the mean of the ranks' pairs under both,
how many tokens follow each other on a rank, the mean, and the milliseconds in which a core of the
machine that wrote this page finds the layout. Then the bytes of a layer, forward and backward, on
the bottleneck link, over those under zigzag: nodes of 8 ranks and one node of all, as many kv heads
as query heads and 8 times fewer, of size 128, bfloat16. Each of the four has a layout of its own:
imbalance and milliseconds are the largest. Documents are drawn at random: exponential lengths of
these means, and lognormal ones of median 1k and sigma 1.5. Sequences between these, and the bytes
themselves, are in [{name}.csv]({name}.csv).

{cells}

## Where there are more bytes

Above 1 are {more} of all {every} figures, at most {most}: documents of more work than a rank, or
than a node. That no layout with equal work sends less there is not proved. Take one of n tokens
with the work of k ranks. To share its work, k ranks hold n/k tokens of it each, from both ends:
half of a part goes to ranks farther inside, all of it to those farther outside. In the mean a rank
sends 0.75·n·(k-1)/k rows, and the innermost n·(k-1)/k; in the backward each sends and receives
1.5·n·(k-1)/k. Zigzag leaves it in c < k contiguous chunks: the rank of the first sends n·(c-1)/c
rows, and in the backward a rank sends and receives as many. So where c is 2 and k large, the
forward has up to twice the bytes and the backward up to three times. Where c and k are close, the
bytes of other documents decide. Between nodes a ring sends a node all rows from the first to the
last that its ranks need, also what lies between two documents; so those that are on the same nodes
lie side by side.

[How it works](how-it-works.md#balanced-documents)
"""

type Row = Mapping[str, str]


def documents(lengths: str, tokens: int, seed: int) -> Mask:
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        borders.append(min(tokens, borders[-1] + max(1, round(LENGTHS[lengths](draw)))))
    return Mask.causal(documents=borders)


def bottleneck(layout: Layout, mask: Mask, nodes: Sequence[int], kv_heads: int) -> int:
    """The bytes that the plans of a layer put on the bottleneck link."""
    shape, config = Shape(layout.local_tokens, 32, kv_heads, 128, 128, 2, 4), BurstConfig()
    grid, _ = choose_grid(config.shape_of_rings, nodes)
    choice = choose(config, Tiling(layout, mask), grid, shape, nodes)
    return choice.forward[0].cost.bottleneck + choice.backward[0].cost.bottleneck


def row(lengths: str, tokens: int, ranks: int, seed: int = 1) -> Row:
    """One situation, as the CSV has it."""
    mask, usual, sent = documents(lengths, tokens, seed), zigzag(tokens, ranks), {}
    uneven, milliseconds = 0.0, 0.0
    for (place, a_node), (heads, kv_heads) in product(PLACES.items(), HEADS.items()):
        nodes = [rank // a_node for rank in range(ranks)]
        started = time.process_time()
        found = balanced(mask, tokens, nodes, 32 // kv_heads)
        milliseconds = max(milliseconds, 1e3 * (time.process_time() - started))
        uneven = max(uneven, found.imbalance)
        before, now = (bottleneck(x, mask, nodes, kv_heads) for x in (usual, found.layout))
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
        "zigzag": f"{imbalance(usual, mask):.2f}",
        "balanced": f"{uneven:.3f}",
        "chunk": str(found.chunk),
        "ms": f"{milliseconds:.1f}",
        **{name: str(value) for name, value in sent.items()},
    }


def ratios(found: Sequence[Row]) -> list[float]:
    """All bytes of these situations over those under zigzag."""
    return [float(row[f"{place} {heads}"]) for row in found for place in PLACES for heads in HEADS]


def write(found: Sequence[Row], path: Path) -> None:
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    columns = [name for name in found[0] if not name.endswith((" zigzag", " balanced"))]
    lines = [columns, ["---"] * len(columns)]
    lines += [[each[c] for c in columns] for each in found if each["tokens"] in ("128k", "1024k")]
    cells = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    sent = ratios(found)
    counts = {"more": sum(x > 1 for x in sent), "every": len(sent), "most": max(sent)}
    path.write_text(TEXT.format(name=path.stem, cells=cells, **counts))


if __name__ == "__main__":
    write([row(*case) for case in product(LENGTHS, TOKENS, RANKS)], PAGE)
