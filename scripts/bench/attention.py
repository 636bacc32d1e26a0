#!/usr/bin/env python
"""Times attention alone: every algorithm, mask, number of ranks and share of KV heads.

    python scripts/bench/attention.py [--ranks 2 4] [--masks causal full] [--heads 8:8 8:2]
    torchrun --nproc-per-node 8 scripts/bench/attention.py --device cuda

Without torchrun the ranks are processes of this machine over gloo, for each number of --ranks in
turn, and nodes are those of --ranks-per-node, in name only. Under torchrun they are its ranks, on
GPUs over NCCL. A repetition runs every algorithm once, in a new order, with a barrier before each
forward and each backward, and takes as long as its slowest rank. Writes a page and its CSV, a row a
case: bytes counted, FLOPs, median, quartiles, and the ratio to the flat ring in the same run.
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from algorithms import (
    BASELINE,
    PHASES,
    SETTINGS,
    Attention,
    Place,
    Sizes,
    heads_fit,
    is_itself,
    make_context,
)
from page import Page, Row, origin, output, parse, parser, table
from ranks import join, launch, under_torchrun
from turns import check_load, in_turns, spread

from megatron_burst import BurstContext, Mask
from megatron_burst.plans.cost import visible_pairs

MASKS = ("causal", "full", "window", "documents", "blocks")
WINDOW = 8  # a query sees this part of the sequence
DOCUMENTS = (0, 1, 4, 5, 11, 12, 16)  # where they begin and end, in sixteenths of the sequence
BLOCKS = 16  # each sees the first, the one before it and itself
MATMULS = {"forward": 2, "backward": 5, "step": 7}  # of a pair of tokens: 2 FLOPs an element each
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"tokens": [512], "heads": [(8, 8), (8, 2), (8, 1)], "head_dim": 64, "dtype": "float32"},
    "cuda": {
        "tokens": [4096, 32768],
        "heads": [(32, 32), (32, 8), (32, 4)],
        "head_dim": 128,
        "dtype": "bfloat16",
    },
}


@dataclass(frozen=True)
class Case:
    """What is attended to, whatever the algorithm."""

    mask: str
    place: Place
    sizes: Sizes
    dtype: str
    kernel: str

    def make_mask(self) -> Mask:
        return mask_of(self.mask, self.place.ranks * self.sizes.tokens)

    def flops(self, phase: str) -> int:
        """Of all ranks together."""
        pairs = visible_pairs(self.make_mask(), self.place.ranks * self.sizes.tokens)
        return MATMULS[phase] * 2 * self.sizes.heads * self.sizes.head_dim * pairs

    def columns(self) -> Row:
        return {
            "benchmark": "attention",
            "mask": self.mask,
            "ranks": self.place.ranks,
            "nodes": self.place.nodes,
            **self.sizes._asdict(),
            "dtype": self.dtype,
            "kernel": self.kernel,
        }


def mask_of(name: str, tokens: int) -> Mask:
    if name == "window":
        return Mask.causal(window=tokens // WINDOW - 1)
    if name == "documents":
        return Mask.causal(documents=[part * tokens // DOCUMENTS[-1] for part in DOCUMENTS])
    if name == "blocks":
        sees = torch.eye(BLOCKS, dtype=torch.bool)
        sees |= torch.eye(BLOCKS, dtype=torch.bool).roll(-1, 1)
        sees[:, 0] = True
        return Mask.causal(block_table=sees)
    return Mask.causal() if name == "causal" else Mask.full()


def cases(args: argparse.Namespace, place: Place) -> Iterator[Case]:
    for tokens, (heads, kv_heads), mask in product(args.tokens, args.heads, args.masks):
        yield Case(
            mask, place, Sizes(tokens, heads, kv_heads, args.head_dim), args.dtype, args.kernel
        )


def measure(args: argparse.Namespace, place: Place) -> list[Row]:
    """Measure all cases on these ranks; every rank gets the rows."""
    torch.set_num_threads(1)
    names = [name for name in args.algorithms if is_itself(name, place)]
    contexts = {name: make_context(name, place, kernel=args.kernel) for name in names}
    return [row for case in cases(args, place) for row in measure_case(args, case, contexts)]


def measure_case(
    args: argparse.Namespace, case: Case, contexts: Mapping[str, BurstContext]
) -> list[Row]:
    mask, dtype = case.make_mask(), getattr(torch, case.dtype)
    runs = {
        name: Attention(context, case.sizes, mask, args.device, dtype)
        for name, context in contexts.items()
        if heads_fit(name, case.sizes.heads, case.sizes.kv_heads, case.place)
    }
    sent = slowest({name: [run.count_bytes()] for name, run in runs.items()})
    says = f"{case.place}, {case.sizes}, {case.mask}" if dist.get_rank() == 0 else ""
    ways = {name: run.once for name, run in runs.items()}
    times = slowest(in_turns(ways, args.repetitions, says=says))
    return [row for name in runs for row in rows(case, name, times, sent)]


def slowest[Number: (int, float)](
    mine: Mapping[str, Sequence[tuple[Number, Number]]],
) -> dict[str, list[tuple[Number, Number]]]:
    """Return the largest numbers of all ranks: forward and backward of every call."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dict(mine))
    return {
        name: [
            tuple(map(max, zip(*call, strict=True)))
            for call in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in mine
    }


def rows(
    case: Case,
    name: str,
    times: Mapping[str, Sequence[tuple[float, float]]],
    sent: Mapping[str, Sequence[tuple[int, int]]],
) -> Iterator[Row]:
    """Yield the forward, the backward and the step of one algorithm."""

    def of_phase(pairs: Sequence[tuple[Any, Any]], phase: str) -> list[Any]:
        return [{"forward": a, "backward": b, "step": a + b}[phase] for a, b in pairs]

    for phase in PHASES:
        seconds, baseline = (of_phase(times[n], phase) for n in (name, BASELINE))
        found = spread(seconds)
        flops = case.flops(phase)
        yield {
            **case.columns(),
            "algorithm": name,
            "phase": phase,
            **found,
            "repetitions": len(seconds),
            "ratio": median(a / b for a, b in zip(seconds, baseline, strict=True)),
            "bytes_of_a_rank": of_phase(sent[name], phase)[0],
            "flops": flops,
            "tflops_a_rank": flops / case.place.ranks / found["median_s"] / 1e12,
        }


def body(found: Sequence[Row]) -> str:
    """Return a table of the steps, by algorithm and mask, for each number of ranks and tensors."""
    tables: dict[tuple[Place, Sizes], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in (row for row in found if row["phase"] == "step"):
        place = Place(row["ranks"], row["ranks"] // row["nodes"])
        sizes = Sizes(*(row[name] for name in Sizes._fields))
        megabytes = row["bytes_of_a_rank"] / 2**20
        cell = f"{1e3 * row['median_s']:.1f} ({row['ratio']:.2f}), {megabytes:.2f}"
        tables[place, sizes].setdefault(row["algorithm"], {})[row["mask"]] = cell
    parts = []
    for (place, sizes), lines in tables.items():
        masks = list(lines[BASELINE])
        cells = [[name, *(line[mask] for mask in masks)] for name, line in lines.items()]
        parts += [f"## {place}, {sizes}", table(["algorithm", *masks], cells, numbers=1)]
    return "\n\n".join(parts)


ABOUT = """
Forward and backward of attention alone, batch 1, zigzag, {dtype}: milliseconds (ratio to
{baseline}), MiB that the library counts on the rank that sends most. Milliseconds are the median of
{repetitions} repetitions, each as long as its slowest rank, the algorithms in a new order each
time; the ratio is the median of the repetitions' ratios. Ranks: {where}. The hybrids share the
heads out over pairs of ranks.

Masks: window: a query sees one part in {window} of the sequence before it; documents: six, of 1, 3,
1, 6, 1 and 4 sixteenths of the sequence; blocks: each of {blocks} sees the first, the one before it
and itself. All but full are causal. Forward and backward apart, quartiles and FLOPs are in the CSV.
"""


def flags(arguments: Sequence[str]) -> argparse.Namespace:
    made = parser(__doc__, "attention")
    add = made.add_argument
    add("--device", choices=[*DEFAULTS], default="cpu")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="not under torchrun")
    add("--ranks-per-node", type=int, default=2, help="not under torchrun")
    add("--masks", nargs="+", choices=MASKS, default=[*MASKS])
    add("--heads", type=_heads, nargs="+", metavar="QUERY:KV")
    add("--tokens", type=int, nargs="+", help="of a rank")
    add("--head-dim", type=int)
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--algorithms", nargs="+", choices=[*SETTINGS], default=[*SETTINGS], metavar="NAME")
    add("--kernel", default="auto", help="as --burst-kernel")
    add("--repetitions", type=int, default=7)
    add("--force", action="store_true", help="measure under load too")
    args = parse(made, arguments, DEFAULTS)
    if BASELINE not in args.algorithms:
        made.error(f"--algorithms must name {BASELINE}, which the others are compared with")
    if args.device == "cuda" and not under_torchrun():
        made.error("--device cuda runs under torchrun, a rank on each GPU")
    if any(ranks % min(ranks, args.ranks_per_node) for ranks in args.ranks):
        made.error(f"--ranks {args.ranks} must be multiples of --ranks-per-node")
    return args


def _heads(text: str) -> tuple[int, int]:
    query, _, kv = text.partition(":")
    return int(query), int(kv or query)


def run(args: argparse.Namespace) -> list[Row]:
    """Measure on torchrun's ranks, or on processes for every number of them."""
    if under_torchrun():
        join(args.device)
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return measure(args, Place(dist.get_world_size(), local))
    places = [Place(ranks, min(ranks, args.ranks_per_node)) for ranks in args.ranks]
    return [row for place in places for row in launch(measure, place.ranks, args, place)[0]]


def main() -> None:
    args = flags(sys.argv[1:])
    torch.set_num_threads(1)
    first = int(os.environ.get("RANK", "0")) == 0
    load = check_load(args.force or under_torchrun())  # there it is that of the ranks' own start
    here = origin(args.device, load)
    found = run(args)
    if first:
        about = ABOUT.format(
            dtype=args.dtype,
            repetitions=args.repetitions,
            baseline=BASELINE,
            where="torchrun's" if under_torchrun() else "processes with one thread each over gloo",
            window=WINDOW,
            blocks=BLOCKS,
        )
        page = Page("Attention alone, every algorithm and mask", about, body(found), found, here)
        page.publish(output(args, "attention"))
    if under_torchrun():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
