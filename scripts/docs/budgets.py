"""Counts what a rank does beside its attention kernels, and what lives meanwhile, without a GPU.

python scripts/docs/budgets.py [NUMBER ...]

Writes docs/budgets.md and the .csv beside it; of a few rows of the .csv, by number, these alone.
"""

import csv
import random
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from megatron_burst import Mask  # noqa: E402
from tests.fake_ring import Counted, Pass, count  # noqa: E402

PAGE = ROOT / "docs" / "budgets.md"
TOKENS = 1024  # of a rank
HEADS = {"4:4": 4, "8:1": 1}  # kv heads
PARTS = {
    "comm": "receive buffers",
    "gradient_accumulation": "sums of gradients, and what is being sent of them",
    "merge": "sums of outputs",
    "surrogate": "surrogate outputs",
    "fake_ring": "what kernels returned",
    "head_chunks": "copies of a chunk's heads, and what is joined of all",
    "backward": "gradients that are returned",
}
SHOWN = ("calls", "kernels", "bytes", "peak")
TEXT = """\
# What a rank does beside its attention kernels

<!-- written by python scripts/docs/budgets.py -->

Counted, not measured: forward and backward of one attention call run on fake CUDA tensors in a
fake process group, bfloat16, {tokens} tokens a rank, heads of 128, of the rank in the middle.
Bytes are in those of q, so that the number of tokens does not matter.
`tests/attention/test_budgets.py` fails where one grows, where the host would wait for the device
(a value read, a copy between devices), or where ranks post messages in an order that does not get
through.

* **calls**: of the attention kernel.
* **kernels**, **bytes**: of what runs between these calls, and what it reads and writes; an
  operation of torch is a kernel, and so is a fused one.
* **peak**: the most that lives beyond q, k and v, in the backward also beyond the output, its
  log-sum-exp and its gradient. What a kernel uses inside is not seen.

A window is of three ranks' tokens; `documents` are a thousand in the sequence. A mesh on one node
is of its ranks. `kv of 2` and `kv of 4` are rings with `--burst-blocks-per-call` 2 and 4, `mesh of
2` and `mesh of 4` meshes of keys with these; others have one block a call. `kv / 2` has
`--burst-head-chunks` 2, others 1. [All figures]({name}.csv).

{table}

## What lives at the peak

With as many kv heads as query heads, causal:

{peaks}

A tensor of the size of q is 1, its float32 sum 2; K and V of a block are 2. A flat kv ring has
two blocks at a time (4), raw gradients on their way in and out (4), float32 sums of dQ, dK and dV
(6) and what the kernel returns. Between nodes there are three blocks (6). Beside the rank's own
sums (6) a part of one tile is being sent (2) and another arrives (2), both as a kernel returned
them. A node's sum in float32 grows (4) while that of the pass before is on its way to its owner for
a whole pass (4), and one of the rank's own arrives (4); the kernel returns 2.5: together 30.5.
`--burst-grad-dtype model` saves 4 of them (26.5, and 21.6 in a query backward): sums between nodes
in bfloat16, rounded once. Sums sent in n pieces one after the other would save 4 - 4/n of what
arrives, with four 3 (27.5), but nothing of what leaves, for the next sum begins to grow before the
first piece is through.

The goal there was 24. With the heads in two chunks it is {of_two}: half of all this (15.2), copies
of the chunk's q, k, v, output and its gradient (2.5), and the gradients of the other (1.5). With
four it is {of_four}. `auto` cuts them where a kernel call fills an H100 all the same, with 32 heads
from 16384 tokens a rank on; with fewer `--burst-head-chunks 2` asks for it. The copies are read and
written once: 8 q in a forward, 16 in a backward.

Four blocks a call are eight to a flat ring, of which seven come, and as many raw gradients are
returned by the kernel, parted, sent and received at a time. A call's output is merged once, so a
forward moves 13.6 q where single blocks move 33.8; dK and dV are as many as before, and of blocks
that later queries alone see, two chunks each, those are copied to lie together.

When parts within a node travelled in float32 (c1f6191), a backward on 4 x 8 took 34.5 (kv) and 25.6
(query), on 2 x 16 26.0 and 21.6. Before blocks went straight to every node and arrivals were added
at once (d7dc6b8), the same was 8.0 and 16.5 (kv), 16.1 (query) on 8 ranks; 11.1 and 38.5, 29.1 on
4 x 8; 9.5 and 26.0 (kv) on 2 x 16.

## Beside other implementations

Theirs by reading the sources, causal zigzag on a flat ring of P ranks, of rank r, as many kv
heads as query heads in bfloat16, float32 temporaries counted as if the compiler fused them away:

* **ring-flash-attention** (`zigzag_ring_flash_attn.py`, 0fc25b4). Forward 9: two blocks 4, the
  sum 2, a partial output 1, the next sum 2. Backward 17: two blocks 4, dK and dV in float32 twice
  8, dQ 2, what the kernel returns 3. Sums in float32.
* **TransformerEngine** (`AttnFuncWithCPAndKVP2P`, 2.17.1). Forward 2P for the blocks of all
  steps, which it keeps to the end, (P + r + 1) / 2 for their partial outputs, and 1: 23.5 for P =
  8 and r = 4, 89.5 for P = 32 and r = 16. Backward 14: two blocks with dK and dV 8, dQ 1, what
  the kernel returns 3, the block that the forward received last 2. Outputs and gradients are
  summed in bfloat16.

A merge moves, an element of a partial output, 10 bytes in ring-flash-attention where TorchScript
fuses it and 34 where not, 6 in TransformerEngine, whose sum is of two bytes.
"""

type Row = dict[str, str]


class Case(NamedTuple):
    """One row: what is counted, of a rank in the middle."""

    ranks: int
    nodes: int
    heads: str
    ring: str  # kv, query or mesh, of nodes or of ranks of one; with "of 2" blocks a call, of keys;
    # with "/ 2" if it cuts the heads in as many chunks
    mask: str

    @property
    def place(self) -> str:
        return f"{self.nodes} x {self.ranks // self.nodes}" if self.nodes > 1 else f"{self.ranks}"


def cases() -> list[Case]:
    """Every place with both heads causal, and with the other masks as many heads of each."""
    found = []
    for ranks, nodes in ((8, 1), (32, 4), (32, 2)):
        rings = ("kv", "query") if nodes == 2 else ("kv", "query", "mesh")
        found += [Case(ranks, nodes, heads, ring, "causal") for heads in HEADS for ring in rings]
        masks = ("window", "documents")
        found += [Case(ranks, nodes, "4:4", ring, mask) for mask in masks for ring in rings]
    larger = product(((8, 1), (32, 4)), HEADS, ("kv of 2", "kv of 4"))
    found += [Case(*place, heads, ring, "causal") for place, heads, ring in larger]
    chunked = product(((8, 1), (32, 4)), ("kv", "query", "mesh"), (2, 4))
    found += [Case(*place, "4:4", f"{r} / {n}", "causal") for place, r, n in chunked]
    several = product(HEADS, ("mesh of 2", "mesh of 4"))
    return found + [Case(32, 4, heads, ring, "causal") for heads, ring in several]


def counted(case: Case, rank: int | None = None) -> Counted:
    name, _, chunks = case.ring.partition(" / ")
    ring, _, blocks = name.partition(" of ")
    topology = ""
    if ring == "mesh":
        topology, ring = ring, "kv" if blocks else "query"
    return count(
        *(case.ranks, case.nodes, ring, mask_of(case)),
        kv_heads=HEADS[case.heads],
        tokens=TOKENS,
        topology=topology,
        rank=rank,
        blocks_per_call=int(blocks or 1),
        head_chunks=int(chunks or 1),
    )


def mask_of(case: Case) -> Mask:
    """A window of three ranks' tokens, or a thousand documents."""
    tokens = TOKENS * case.ranks
    if case.mask == "window":
        return Mask.causal(window=3 * TOKENS)
    if case.mask == "documents":
        cuts = random.Random(0).sample(range(1, tokens), 999)
        return Mask.causal(documents=(0, *sorted(cuts), tokens))
    return Mask.causal()


def row(case: Case, found: Counted) -> Row:
    cells = {name: str(value) for name, value in case._asdict().items()}
    calls, passes = (
        (found.call.forward_calls, found.call.backward_calls),
        (found.forward, found.backward),
    )
    chunks = int(case.ring.partition(" / ")[2] or 1)
    for way, made, steps in zip(("forward", "backward"), passes, calls, strict=True):
        cells |= {
            f"{way}_calls": str(chunks * sum(map(len, steps))),
            f"{way}_kernels": str(made.kernels),
            f"{way}_bytes": f"{made.bytes:.1f}",
            f"{way}_peak": f"{made.peak:.2f}",
            f"{way}_at_the_peak": "; ".join(_parts(made)),
        }
    return cells


def _parts(made: Pass) -> list[str]:
    shown = [(PARTS.get(name, name), size) for name, size in made.made_by.items()]
    return [f"{name} {size:.1f}" for name, size in shown if size >= 0.05]


def read() -> list[Row]:
    with PAGE.with_suffix(".csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def write(rows: Sequence[Row], page: Path) -> None:
    with page.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    head = ["ranks", "heads", "ring", "mask"]
    head += [f"{way} {what}" for way in ("forward", "backward") for what in SHOWN]
    lines = [head, ["---"] * len(head), *map(_line, rows)]
    peaks = [
        f"* {Case(int(r['ranks']), int(r['nodes']), *list(r.values())[2:5]).place} {r['ring']}, "
        f"{way}, {r[f'{way}_peak']}: {r[f'{way}_at_the_peak']}."
        for r in rows
        if (r["heads"], r["mask"]) == ("4:4", "causal")
        for way in ("forward", "backward")
    ]
    chunked = {r["ring"]: r["backward_peak"] for r in rows if r["nodes"] == "4"}
    text = TEXT.format(
        table="\n".join(map(_cells, lines)),
        peaks="\n".join(peaks),
        tokens=TOKENS,
        name=page.stem,
        of_two=chunked["kv / 2"],
        of_four=chunked["kv / 4"],
    )
    page.write_text(text)


def _line(cells: Row) -> list[str]:
    case = Case(int(cells["ranks"]), int(cells["nodes"]), *list(cells.values())[2:5])
    ways = ("forward", "backward")
    return [case.place, *case[2:], *(cells[f"{way}_{what}"] for way in ways for what in SHOWN)]


def _cells(line: Sequence[str]) -> str:
    return f"| {' | '.join(line)} |"


def main() -> None:
    every, numbers = cases(), [int(number) for number in sys.argv[1:]]
    rows = read() if numbers else [{}] * len(every)
    for number in numbers or range(len(every)):
        rows[number] = row(every[number], counted(every[number]))
    write(rows, PAGE)


if __name__ == "__main__":
    main()
