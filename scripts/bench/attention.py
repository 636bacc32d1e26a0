#!/usr/bin/env python
"""Times attention alone: every algorithm, mask, number of ranks, share of KV heads and link rate.

    python scripts/bench/attention.py [--places 1x2 2x2] [--masks causal full] [--heads 8:8 8:2]
    python scripts/bench/attention.py --mbit 200 400 inf --places 2x2 4x1 --masks causal
    python scripts/bench/attention.py --gflops 4 --mbit 40 80 --masks causal
    torchrun --nproc-per-node 8 scripts/bench/attention.py --device cuda

Without torchrun the ranks are processes of this machine over gloo. Their nodes, 4x2 being four of
two ranks, are so in name only, or with --mbit network namespaces, in which every rank has a NIC of
so many Mbit/s to the other nodes (inf: without a limit) and links without a limit within its own;
that needs root and iproute2. With --gflops kernels are emulated, see paced.py. Under torchrun
the ranks are its own, on GPUs over NCCL.
"""

import argparse
import math
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
import torch.distributed as dist
from algorithms import (
    BASELINE,
    DEFAULT,
    SETTINGS,
    Attention,
    Kernels,
    Place,
    Sizes,
    make_context,
    once,
    runs_here,
)
from harness import Row
from paced import paced
from ranks import join, launch
from shaped_links import LinkError, refuse_where_impossible, shaped_links

from megatron_burst import BurstContext, Mask
from megatron_burst.plans.choice.cost import Shape, visible_pairs

PACKED = "documents:"  # and how many tokens one has in the mean
MASKS = ("causal", "full", "window", f"{PACKED}256", "blocks")
RINGS = [name for name in SETTINGS if "flat" in name or "double" in name]
WINDOW = 8  # a query sees this part of the sequence
BLOCKS = 16  # each sees the first, the one before it and itself
PHASES = {"forward": (1, 0), "backward": (0, 1), "step": (1, 1)}  # what each adds up
MATMULS = {"forward": 2, "backward": 5, "step": 7}  # of a pair of tokens: 2 FLOPs an element each
MESSAGE_BYTES = 8 * 10**6
DEFAULTS: Mapping[str, Row] = {
    "cpu": {"tokens": [512], "heads": [(8, 8), (8, 2), (8, 1)], "head_dim": 64, "dtype": "float32"},
    "cuda": {
        "tokens": [4096, 32768],
        "heads": [(32, 32), (32, 8), (32, 4)],
        "head_dim": 128,
        "dtype": "bfloat16",
    },
}


class Case(NamedTuple):
    """What is attended to, whatever the algorithm."""

    mask: str
    sizes: Sizes


type Way = tuple[str, str]  # an algorithm, and what of it runs
WHOLE, KERNELS = "whole", "kernels"


class Measured(NamedTuple):
    """What was measured of a case, by what ran."""

    times: dict[Way, Any]  # [repetitions, 2] seconds of forward and backward, of the slowest rank
    sent: dict[str, Any]  # bytes of forward and of backward; of who sends most
    plans: dict[str, str]  # of each algorithm the first one with the same plans on all ranks


def mask_of(name: str, tokens: int) -> Mask:
    if name == "window":
        return Mask.causal(window=tokens // WINDOW - 1)
    if name.startswith(PACKED):
        return Mask.causal(documents=bounds(tokens, int(name.removeprefix(PACKED))))
    if name == "blocks":
        sees = torch.eye(BLOCKS, dtype=torch.bool)
        sees |= torch.eye(BLOCKS, dtype=torch.bool).roll(-1, 1)
        sees[:, 0] = True
        return Mask.causal(block_table=sees)
    return Mask.causal() if name == "causal" else Mask.full()


def bounds(tokens: int, mean: int) -> list[int]:
    """Return the bounds of documents of exponential lengths, the same on every rank."""
    lengths = np.random.default_rng(0).exponential(mean, 4 * tokens // mean + 16)
    ends = np.cumsum(lengths.astype(np.int64) + 1)
    return [0, *ends[ends < tokens].tolist(), tokens]


def measure(
    args: argparse.Namespace, place: Place, number: int = 0
) -> tuple[dict[Case, Measured], float]:
    """Measure all cases on these ranks; return them, and of the last rank the rate of a message."""
    sizes = [Sizes(tokens, *h, args.head_dim) for tokens, h in product(args.tokens, args.heads)]
    names = [n for n in args.algorithms if any(runs_here(n, place, one) for one in sizes)]
    measured = {}
    with paced(1e9 * args.gflops) if args.gflops else nullcontext():
        contexts = {n: make_context(n, place, kernel=args.kernel) for n in names if n != DEFAULT}
        for case in (Case(mask, one) for one, mask in product(sizes, args.masks)):
            if DEFAULT in names:  # it chooses by the shape, as a training does
                shape = shape_of(case, args.dtype)
                contexts[DEFAULT] = make_context(DEFAULT, place, shape, kernel=args.kernel)
            if dist.get_rank() == 0:
                launches = f"launch {number + 1}/{args.launches}"
                harness.progress(f"{place}, {case.sizes}, {case.mask}: {launches}")
            measured[case] = measure_case(args, place, case, contexts, number)
    return measured, median(message_rate() for _ in range(3)) if args.mbit else math.nan


def shape_of(case: Case, dtype: str) -> Shape | str:
    """Return the shape of a rank's tensors where the mask is dense; else why there is none."""
    if case.mask not in ("causal", "full"):
        return "its rings send less under a sparse mask"
    tokens, heads, kv_heads, dim = case.sizes
    size = getattr(torch, dtype).itemsize
    return Shape(tokens, heads, kv_heads, dim, dim, size, 4, sends_raw=True)


def measure_case(
    args: argparse.Namespace,
    place: Place,
    case: Case,
    contexts: Mapping[str, BurstContext],
    number: int,
) -> Measured:
    mask, dtype = mask_of(case.mask, place.ranks * case.sizes.tokens), getattr(torch, args.dtype)
    runs: dict[Way, Attention | Kernels] = {}
    sent, plans = {}, {}
    for name, context in contexts.items():
        if runs_here(name, place, case.sizes):
            about = (context, case.sizes, mask, args.device, dtype)
            whole, kernels = Attention(*about), Kernels(*about)
            runs[name, WHOLE], runs[name, KERNELS] = whole, kernels
            dist.barrier()
            sent[name], plans[name] = whole.count_bytes(), kernels.plan
    ways = {way: partial(once, run, args.device) for way, run in runs.items()}
    # Emulated kernels alone take the same time whenever they run: once is enough.
    alone = {way: ways.pop(way) for way in runs if args.gflops and way[1] == KERNELS}
    times = {way: [kernels()] * args.repetitions for way, kernels in alone.items()}
    times |= harness.in_turns(ways, args.repetitions, seed=number)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (times, sent, plans))
    slowest = {name: np.max([t[name] for t, _, _ in ranks], axis=0) for name in times}
    most = {name: np.max([s[name] for _, s, _ in ranks], axis=0) for name in sent}
    of_all = {name: [plan[name] for *_, plan in ranks] for name in plans}
    first = {name: next(n for n in of_all if of_all[n] == of_all[name]) for name in of_all}
    return Measured(slowest, most, first)


def message_rate() -> float:
    """Return at how many Mbit/s the last rank receives a message; of use on that rank alone."""
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        dist.send(message, last)
    if rank == last:
        dist.recv(message, 0)
    return MESSAGE_BYTES * 8e-6 / (time.perf_counter() - start)


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Measure on torchrun's ranks, or on processes for every number of them and every rate."""
    if args.torchrun:
        join(args.device)
        place = Place(dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
        yield from make_rows(args, place, math.nan, [measure(args, place)])
        dist.destroy_process_group()
        return
    for place, mbit in product(args.places, args.mbit or [math.nan]):
        links = shaped_links(place.nodes, place.ranks_per_node, mbit)
        with links if args.mbit else nullcontext() as cluster:
            names = [cluster.namespace(rank) for rank in cluster.ranks] if cluster else ()
            launches = [
                launch(measure, place.ranks, args, place, number, namespaces=names)[-1]
                for number in range(args.launches)
            ]
        yield from make_rows(args, place, mbit, launches)


def make_rows(
    args: argparse.Namespace,
    place: Place,
    mbit: float,
    launches: Sequence[tuple[Mapping[Case, Measured], float]],
) -> Iterator[Row]:
    """Yield the forward, the backward and the step of every case and algorithm, causal first."""
    causal: dict[Any, float] = {}
    for case, (_, sent, plans) in launches[0][0].items():
        tokens = place.ranks * case.sizes.tokens
        pairs = visible_pairs(mask_of(case.mask, tokens), tokens)
        for name, (phase, parts) in product(sent, PHASES.items()):
            seconds, baseline, alone = (
                np.concatenate([measured[case].times[n] for measured, _ in launches]) @ parts
                for n in ((name, WHOLE), (BASELINE, WHOLE), (name, KERNELS))
            )
            flops = MATMULS[phase] * 2 * case.sizes.heads * case.sizes.head_dim * pairs
            spent = harness.spread(seconds)
            rate, key = pairs / spent["median_s"], (case.sizes, name, phase)
            if case.mask == MASKS[0]:
                causal[key] = rate
            yield {
                "mask": case.mask,
                "mbit": mbit,
                "measured_mbit": median(rate for _, rate in launches),
                **place._asdict(),
                **case.sizes._asdict(),
                "dtype": args.dtype,
                "kernel": args.kernel,
                "algorithm": name,
                "plan_of": plans[name],
                "phase": phase,
                **spent,
                "launches": len(launches),
                "repetitions": args.repetitions,
                "ratio": median(seconds / baseline),
                "kernels_s": median(alone),
                "kernels_share": median(alone / seconds),
                "payload_bytes": int(np.dot(sent[name], parts)),
                "flops": flops,
                "tflops_a_rank": flops / place.ranks / spent["median_s"] / 1e12,
                "over_causal": causal.get(key, math.nan) / rate,
            }


def body(rows: Sequence[Row]) -> str:
    """Return a table of the steps for each place and tensors."""
    tables: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in (row for row in rows if row["phase"] == "step"):
        key = (kind(*(row[name] for name in kind._fields)) for kind in (Place, Sizes))
        tables[tuple(key)].append(row)
    return "\n\n".join(f"## {a}, {b}\n\n{table(steps)}" for (a, b), steps in tables.items())


def table(rows: Sequence[Row]) -> str:
    """Return a line for each algorithm, with a column for each mask or rate."""
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    columns: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        name, column = row["algorithm"], row["mask"]
        column += "" if math.isnan(row["mbit"]) else f", {row['mbit']:g} Mbit/s"
        columns[column][name] = row
        cell = f"{1e3 * row['median_s']:.1f} ({row['ratio']:.2f}), "
        cell += f"{row['payload_bytes'] / harness.MIB:.2f}, {1 - row['kernels_share']:.0%}"
        lines[name][column] = cell
    for column, of in columns.items():
        if "burst auto" in of:
            lines["burst auto / best ring"][column] = over_best(of, "burst auto", RINGS)
        if DEFAULT in of:
            others = [name for name in of if of[name]["plan_of"] != of[DEFAULT]["plan_of"]]
            lines[f"{DEFAULT} / best other"][column] = over_best(of, DEFAULT, others)
    cells = ([name, *line.values()] for name, line in lines.items())
    return harness.table(["algorithm", *columns], cells)


def over_best(rows: Mapping[str, Row], name: str, others: Sequence[str]) -> str:
    """Return an algorithm's time over the least of these."""
    best = min((rows[one]["median_s"] for one in others if one in rows), default=math.nan)
    return f"{rows[name]['median_s'] / best:.2f}"


PAGE = """
# Attention alone: every algorithm and mask

Forward and backward of attention alone, batch 1, zigzag, {dtype}: milliseconds (ratio to
{baseline}), MiB that the library counts on the rank that sends most, and the share of the step that
is not its own kernel calls, timed alone in the same turns: waiting, copies, sums, Python.
Milliseconds are the median of {repetitions} repetitions in each of {launches} launches, each as
long as its slowest rank, the algorithms in a new order each time; the ratio is the median of the
repetitions' ratios, of the last two lines that of medians. The best other is of those whose plans
are not the default's own, column plan_of of the CSV.
{where} The hybrids share the heads out over pairs of ranks.

Masks: window: a query sees one part in {window} of the sequence before it; documents:N: of
some N tokens each (an exponential distribution), with the time over what their FLOPs take at the
causal rate; blocks: each of {blocks} sees the first, the one before it and itself. All but full are
causal. Forward and backward apart, quartiles and FLOPs are in the CSV.

{body}
"""
WHERE = "Ranks: processes with one thread each over gloo."
LINKS = (
    WHERE
    + """ Every rank has a NIC of the given speed to the other nodes, shaped in both
directions, and links without a limit within its node; TCP reno, no slow start
after idling."""
)

PACED = """ Kernels compute
nothing: each takes the time of its FLOPs at {:g} GFLOP/s, as if every rank had a processor of its
own, and plans are chosen for that rate. Alone they ran once, before all turns."""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = harness.Flags(__doc__, DEFAULTS)
    add = made.add_argument
    two = [Place(2, 2), Place(4, 2)]
    add("--places", type=_place, nargs="+", default=two, metavar="NODESxRANKS", help="1x2 2x2")
    add("--mbit", type=float, nargs="+", help="of a rank's NIC, in namespaces")
    add("--gflops", type=float, help="at which kernels on CPUs are emulated: they sleep")
    text = f"of {', '.join(MASKS)}, or documents:N of some N tokens each"
    add("--masks", type=_mask, nargs="+", default=[*MASKS], metavar="NAME", help=text)
    add("--heads", type=_heads, nargs="+", metavar="QUERY:KV")
    add("--tokens", type=int, nargs="+", help="of a rank")
    add("--head-dim", type=int)
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--algorithms", nargs="+", choices=[*SETTINGS], default=[*SETTINGS], metavar="NAME")
    add("--kernel", default="auto", help="as --burst-kernel")
    add("--launches", type=int, default=1, help="each with fresh processes")
    args = made.read(given)
    args.masks.sort(key=MASKS[0].__ne__)  # whose rate the others are compared with
    args.torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if BASELINE not in args.algorithms:
        made.error(f"--algorithms must name {BASELINE}, which the others are compared with")
    if args.device == "cuda" and not args.torchrun:
        made.error("--device cuda runs under torchrun, a rank on each GPU")
    if args.gflops and args.torchrun:
        made.error(f"--gflops {args.gflops} is of ranks without torchrun")
    return args


def _place(text: str) -> Place:
    nodes, ranks = map(int, text.split("x"))
    if min(nodes, ranks) < 1:
        raise ValueError
    return Place(nodes * ranks, ranks)


def _mask(text: str) -> str:
    if text not in MASKS and not re.fullmatch(PACKED + r"[1-9]\d*", text):
        raise ValueError
    return text


def _heads(text: str) -> tuple[int, int]:
    query, _, kv = text.partition(":")
    return int(query), int(kv or query)


def main() -> None:
    args = flags()
    if args.mbit:
        refuse_where_impossible()
    if not args.torchrun:
        harness.wait_until_quiet(args.force)
    here, rows = harness.origin(args.device), [*run(args)]
    if int(os.environ.get("RANK", "0")) == 0:
        name = "paced" if args.gflops else "two_nodes" if args.mbit else "attention"
        where = LINKS if args.mbit else "Ranks: torchrun's." if args.torchrun else WHERE
        where += PACED.format(args.gflops) if args.gflops else ""
        words = {"where": where, "body": body(rows), "baseline": BASELINE}
        harness.publish(args, name, PAGE, rows, here, **words, window=WINDOW, blocks=BLOCKS)


if __name__ == "__main__":
    try:
        main()
    except (LinkError, RuntimeError) as error:
        sys.exit(f"attention: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
