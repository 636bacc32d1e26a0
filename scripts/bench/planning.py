#!/usr/bin/env python
"""Measures how long one rank plans, and how long a layer takes that was planned before.

    python scripts/bench/planning.py

CPU time of one thread, of which the counting loop beside it says how fast the machine was.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise

import torch
from harness import Flags, Row, origin, publish, seconds, spread, table, wait_until_quiet

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention.launches import launches_of
from megatron_burst.attention.preparing import prepare
from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.machine import H100
from megatron_burst.plans.choice.planning import choose
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.gc_pause import without_gc
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.layout import Layout, zigzag, zigzag_of_each

A_NODE, CALLS, COUNTED = 8, 10_000, 20_000_000
# Ranks, tokens of a rank, documents.
CASES = ((64, 16384, 1), (64, 16384, 500), (512, 8192, 4000), (1024, 1024, 1))
FEW, WINDOW = 64, 4096
DEALT = ((64, 16384, 1000), (512, 8192, 4000))


def mask(tokens: int, documents: int) -> Mask:
    borders = sorted(random.Random(1).sample(range(1, tokens), documents - 1))
    return Mask.causal(documents=[0, *borders, tokens] if documents > 1 else None)


def nodes_of(ranks: int) -> list[int]:
    return [rank // A_NODE for rank in range(ranks)]


@without_gc()
def plan(layout: Layout, seen: Mask) -> None:
    """Plan as a rank does: choose the schedules of all, then make one's own plans and calls."""
    ranks, local = layout.ranks, layout.local_tokens
    rows = tuple(tuple(range(i, i + A_NODE)) for i in range(0, ranks, A_NODE))
    tiling, shape = Tiling(layout, seen), Shape(local, 32, 8, 128, 128, 2, 4)
    nodes = nodes_of(ranks)
    links = Links.of(nodes, shape, H100, 1)
    choice = choose(BurstConfig(), tiling, Grid(rows), shape, nodes, links=links)
    launches_of(choice.plans(ranks // 2), 1, torch.device("cpu"))


def apart(
    seen: Mask, ranks: int, window: int | None = None, *, padded: bool = False
) -> tuple[Layout, Mask]:
    """Return documents of about these lengths, each in zigzag by itself, as packed batches come."""
    chunk, bounds = 2 * ranks, seen.documents or ()
    borders = [round(bound / chunk) * chunk for bound in bounds]
    lengths = [b - a for a, b in pairwise(borders) if b > a]
    draw, documents = random.Random(2), [0, *accumulate(lengths)]
    whole = [length - draw.randrange(chunk) for length in lengths] if padded else None
    mask = Mask.causal(window=window, documents=documents, lengths=whole)
    return zigzag_of_each(lengths, ranks), mask


def plans() -> Iterator[tuple[str, Callable[[], object]]]:
    name = "{} ranks, {} tokens each, {} document(s)"
    for case in CASES:
        ranks, local, documents = case
        seen, tokens = mask(ranks * local, documents), ranks * local
        yield f"a plan of {name.format(*case)}", partial(plan, zigzag(tokens, ranks), seen)
        if documents > 1:
            layout = balanced(seen, tokens, nodes_of(ranks)).layout
            yield f"a plan of {name.format(*case)}, balanced", partial(plan, layout, seen)
            each = f"a plan of {name.format(*case)}, each in zigzag"
            yield each, partial(plan, *apart(seen, ranks))
            if ranks <= FEW:
                yield f"{each}, padded", partial(plan, *apart(seen, ranks, padded=True))
                yield f"{each}, window {WINDOW}", partial(plan, *apart(seen, ranks, WINDOW))
    for case in DEALT:
        ranks, local, documents = case
        seen = mask(ranks * local, documents)
        dealt = partial(balanced, seen, ranks * local, nodes_of(ranks))
        yield f"the balanced layout of {name.format(*case)}", dealt


def seen_before(documents: int) -> Callable[[], None]:
    """Return what looks a planned layer up `CALLS` times."""
    context, x = BurstContext.create(BurstConfig()), torch.zeros(1, 16384, 1, 8)
    seen = mask(16384, documents)

    def look_up() -> None:
        for _ in range(CALLS):
            prepare(context, x, x, x, seen, 1.0)

    look_up()
    return look_up


def count() -> None:
    for _ in range(COUNTED):
        pass


PAGE = """
# Planning

CPU time of one thread, median of {repetitions} and the least, in milliseconds; nodes of 8 ranks,
causal, zigzag but where said. A plan is the choice of the schedules, one rank's forward and
backward, and their kernel calls with their tables. A layer that was seen before is one call of
`prepare`, the mean of 10,000.

{body}
"""


def main() -> None:
    args, here = Flags(__doc__).read(), origin()
    wait_until_quiet(args.force)
    jobs: dict[str, tuple[Callable[[], object], int]] = {"counting to 20 million": (count, 1)}
    jobs |= {what: (run, 1) for what, run in plans()}
    for documents in (1, 4000):
        jobs[f"a layer seen before, {documents} document(s)"] = (seen_before(documents), CALLS)
    rows = list[Row]()
    for what, (run, calls) in jobs.items():
        run()
        times = [seconds(run) / calls for _ in range(args.repetitions)]
        rows.append({"what": what, **spread(times)})
    cells = ([r["what"], f"{1e3 * r['median_s']:.4g}", f"{1e3 * r['least_s']:.4g}"] for r in rows)
    publish(args, "planning", PAGE, rows, here, body=table(["what", "median", "least"], cells))


if __name__ == "__main__":
    main()
