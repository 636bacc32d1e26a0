"""Counts what a rank does beside its attention kernels, and what lives meanwhile, without a GPU.

python scripts/docs/budgets.py [NUMBER ...]

Writes the tables of docs/budgets.md, with the .csv beside it, and of docs/design/nccl.md; of a few
rows, by number, these alone.
"""

import random
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from channels import channels
from pages import fill, parser, read_csv, table, write_csv

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from megatron_burst import Mask  # noqa: E402
from tests.fake_ring import Counted, Pass, count  # noqa: E402

PAGE = ROOT / "docs" / "budgets.md"
NCCL = ROOT / "docs" / "design" / "nccl.md"
TOKENS = 1024  # of a rank
HEADS = {"4:4": 4, "8:1": 1}  # kv heads
PARTS = {
    "memory": "messages",
    "lowered": "messages",
    "sums": "sums",
    "surrogate": "surrogate outputs",
    "one_rank": "what kernels return, and their workspace",
    "head_chunks": "copies of a chunk's heads, and what is joined of all",
    "passes": "gradients that are returned",
}
WAYS = ("forward", "backward")
type Row = dict[str, str]


class Case(NamedTuple):
    """One row: what is counted, of a rank in the middle."""

    ranks: int
    nodes: int
    heads: str
    ring: str  # kv, query or mesh, of nodes or of ranks of one; "/ 2" if it cuts the heads in two
    mask: str


def cases() -> list[Case]:
    """Every place with both heads causal, and with the other masks as many heads of each."""
    every = []
    for ranks, nodes in ((8, 1), (32, 4), (32, 2)):
        rings = ("kv", "query") if nodes == 2 else ("kv", "query", "mesh")
        every += [Case(ranks, nodes, heads, ring, "causal") for heads in HEADS for ring in rings]
        masks = ("window", "documents")
        every += [Case(ranks, nodes, "4:4", ring, mask) for mask in masks for ring in rings]
    chunked = product(((8, 1), (32, 4)), ("kv", "query", "mesh"), (2, 4))
    return every + [Case(*place, "4:4", f"{r} / {n}", "causal") for place, r, n in chunked]


def counted(case: Case, rank: int | None = None) -> Counted:
    ring, _, chunks = case.ring.partition(" / ")
    topology = ""
    if ring == "mesh":
        topology, ring = ring, "query"
    return count(
        *(case.ranks, case.nodes, ring, mask_of(case)),
        kv_heads=HEADS[case.heads],
        tokens=TOKENS,
        topology=topology,
        rank=rank,
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


def row(case: Case, counts: Counted) -> Row:
    cells = {name: str(value) for name, value in case._asdict().items()}
    chunks = int(case.ring.partition(" / ")[2] or 1)
    for way in WAYS:
        made, steps = getattr(counts, way), getattr(counts.call, f"{way}_launches")
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


def parts(rows: Sequence[Row]) -> dict[str, str]:
    """What the page has of them."""
    shown = [f"{way}_peak" for way in WAYS]
    causal = [each for each in rows if each["mask"] == "causal"]
    most = [e for e in causal if e["heads"] == "4:4" and " / " not in e["ring"]]
    more = [e for e in causal if e["nodes"] == "4" and e["ring"].startswith("kv") and e not in most]
    lines = [[_place(e), *(e[name] for name in ("heads", "ring", *shown))] for e in most + more]
    head = ["ranks", "heads", "ring", *(name.replace("_", " ") for name in shown)]
    return {"table": table(head, lines)}


def _place(each: Row) -> str:
    ranks, nodes = int(each["ranks"]), int(each["nodes"])
    return f"{nodes} x {ranks // nodes}" if nodes > 1 else f"{ranks}"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("numbers", type=int, nargs="*", metavar="NUMBER")
    every, numbers = cases(), arguments.parse_args().numbers
    rows = read_csv(PAGE) if numbers else [{}] * len(every)
    for number in numbers or range(len(every)):
        rows[number] = row(every[number], counted(every[number]))
    write_csv(PAGE, rows)
    fill(PAGE, parts(rows))
    fill(NCCL, {"channels": channels()})


if __name__ == "__main__":
    main()
