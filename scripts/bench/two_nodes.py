#!/usr/bin/env python
"""Times every algorithm on two nodes that are made of network namespaces of one machine.

    python scripts/bench/two_nodes.py [--mbit 400] [--tokens 512] [--kv-heads 8]
    python scripts/bench/two_nodes.py --suite

Every rank has a card of --mbit Mbit/s to the other nodes and links without a limit to the ranks of
its own node (see shaped_links.py); that needs root and iproute2. --mbit inf is a card without a
limit; --mbit 0 is plain loopback with all ranks on one node and needs neither. --suite measures all
link rates and all situations that have targets and writes a page and its CSV.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
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
    make_context,
)
from page import Page, Row, origin, output, parse, parser, table
from ranks import launch
from shaped_links import CARD, LinkError, bytes_out, refuse_where_impossible, shaped_links
from situations import (
    SUITE,
    Ratio,
    Seconds,
    Situation,
    Times,
    column,
    kernels_of,
    kernels_share,
    medians,
    rate_name,
    slowest,
)
from turns import busy_share, check_load, in_turns, progress, spread

from megatron_burst import BurstContext, Mask
from megatron_burst.plans.head_parallel import kv_head_copies
from megatron_burst.transport.blocks import rows_of

MASK = Mask.causal()
MESSAGE_BYTES = 8 * 10**6


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of one launch are told."""

    situation: Situation
    algorithms: Sequence[str]
    place: Place
    repetitions: int
    number: int  # of the launch


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank found in a launch."""

    times: Mapping[
        str, Sequence[tuple[float, float]]
    ]  # seconds of forward and backward, by what ran
    traffic: Mapping[str, tuple[int, int, int]]  # bytes: counted payload, by card, by all devices
    rate: float  # Mbit/s of one large message from the first rank to the last, alone
    auto: str  # what `burst auto` chose


class KernelsAlone(Attention):
    """The kernel calls of an algorithm and nothing else, on local tensors in place of messages."""

    def __init__(self, context: BurstContext, sizes: Sizes) -> None:
        super().__init__(context, share_of_heads(sizes, context.heads.size), MASK)
        q, k, v = (x.detach() for x in self.qkv)
        self.qkv = q, k, v
        self.call = context.prepare(q, k, v, MASK, q.shape[-1] ** -0.5)
        batch, tokens, heads, _ = q.shape
        lse = torch.full((batch, heads, tokens), math.log(tokens))  # about what it would be
        self.finished = torch.zeros_like(q), lse

    def forward(self) -> Any:
        for tile in self.call.forward_plan.tiles:
            self.call.kernel.forward(self.call.of_tile(tile, *self.qkv))

    def backward(self, _: Any) -> None:
        out, lse = self.finished
        for tile in self.call.backward_plan.tiles:
            finished = rows_of((self.dout, out, lse), tile.query_rows)
            self.call.kernel.backward(self.call.of_tile(tile, *self.qkv), *finished)


def share_of_heads(sizes: Sizes, ranks: int) -> Sizes:
    """Return what a rank holds after an all-to-all over the heads with so many ranks."""
    copies = kv_head_copies(sizes.heads, sizes.kv_heads, ranks)
    heads, kv_heads = sizes.heads // ranks, sizes.kv_heads * copies // ranks
    return Sizes(sizes.tokens * ranks, heads, kv_heads, sizes.head_dim)


def measure(job: Job) -> Share:
    """Be one rank of a launch."""
    runs: dict[str, Attention] = {}
    for name in job.algorithms:
        context, sizes = make_context(name, job.place), job.situation.sizes
        runs[name] = Attention(context, sizes, MASK)
        runs[kernels_of(name)] = KernelsAlone(context, sizes)
    for run in runs.values():
        run.once()  # makes plans, connections and memory ready
    traffic = {name: count_bytes(runs[name]) for name in job.algorithms}
    rate = median(message_rate() for _ in range(3))
    says = f"  launch {job.number + 1}" if dist.get_rank() == 0 else ""
    ways = {name: run.once for name, run in runs.items()}
    times = in_turns(ways, job.repetitions, seed=job.number, warm_up=0, says=says)
    auto = runs["burst auto"].choice() if "burst auto" in runs else ""
    return Share(times, traffic, rate, auto)


def count_bytes(run: Attention) -> tuple[int, int, int]:
    """Return the payload that this rank counts for a step, and what its devices count."""
    dist.barrier()
    before = bytes_out()
    payload = sum(run.count_bytes())
    dist.barrier()
    sent = {device: total - before[device] for device, total in bytes_out().items()}
    return payload, sent.get(CARD, 0), sum(sent.values())


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


def times_of(launches: Sequence[Sequence[Share]]) -> Times:
    """Join the ranks' times: a repetition takes as long as its slowest rank."""
    return {
        name: [slowest([share.times[name] for share in shares]) for shares in launches]
        for name in launches[0][0].times
    }


def run_situation(situation: Situation, args: argparse.Namespace) -> tuple[str, list[Row]]:
    """Make the links, run the launches, remove the links; return a section and rows of the CSV."""
    progress(str(situation))
    place, launches, busy = situation.place(args.nodes, args.ranks_per_node), [], 0.0
    algorithms = args.algorithms or situation.algorithms(place)
    links = shaped_links(args.nodes, args.ranks_per_node, situation.mbit)
    with links if situation.mbit else nullcontext() as cluster:
        namespaces = [cluster.namespace(rank) for rank in cluster.ranks] if cluster else ()
        for number in range(args.launches):
            busy = max(busy, busy_share())
            job = Job(situation, algorithms, place, args.repetitions, number)
            launches.append(launch(measure, place.ranks, job, namespaces=namespaces))
    return section(situation, launches, busy), rows(situation, place, launches)


def rows(situation: Situation, place: Place, launches: Sequence[Sequence[Share]]) -> list[Row]:
    times, shares = times_of(launches), launches[0]
    return [
        {
            "benchmark": "two_nodes",
            "mbit": situation.mbit,
            "measured_mbit": median(shares[-1].rate for shares in launches),
            **place._asdict(),
            **situation.sizes._asdict(),
            "algorithm": name,
            "phase": phase,
            **spread([s for repetitions in times[name] for s in column(repetitions, phase)]),
            "median_s": median(medians(times[name], phase)),
            "launches": len(launches),
            "repetitions": len(times[name][0]),
            "ratio": median(Ratio(phase, name).of_launches(times)) if BASELINE in times else "",
            "kernels_s": median(medians(times[kernels_of(name)], phase)),
            "kernels_share": kernels_share(times, name, phase),
            "payload_bytes_of_a_step": max(share.traffic[name][0] for share in shares),
            "card_bytes_of_a_step": max(share.traffic[name][1] for share in shares),
        }
        for name in shares[0].traffic
        for phase in PHASES
    ]


def rates_table(found: Sequence[Row]) -> str:
    """Return what steps take by algorithm and link rate, for tensors measured at several."""
    by_sizes: dict[Sizes, list[Row]] = defaultdict(list)
    for row in found:
        if row["phase"] == "step" and row["mbit"] and row["ratio"]:
            by_sizes[Sizes(*(row[name] for name in Sizes._fields))].append(row)
    parts = []
    for sizes, some in by_sizes.items():
        rates = list(dict.fromkeys(row["mbit"] for row in some))
        if len(rates) > 1:
            ratios = {(row["algorithm"], row["mbit"]): f"{row['ratio']:.3f}" for row in some}
            exposed = {
                (row["algorithm"], row["mbit"]): f"{1 - row['kernels_share']:.0%}" for row in some
            }
            parts += [f"## By link rate: {sizes}"]
            for title, cells in (f"step / {BASELINE}", ratios), ("not kernels", exposed):
                names = dict.fromkeys(name for name, _ in cells)
                lines = ([name, *(cells[name, rate] for rate in rates)] for name in names)
                parts.append(table([title, *map(rate_name, rates)], lines, numbers=1))
    return "\n\n".join(parts)


def times_table(times: Times, algorithms: Iterable[str]) -> str:
    def cell(launches: Sequence[Sequence[Seconds]], phase: str) -> str:
        each = [1e3 * m for m in medians(launches, phase)]
        every = [1e3 * s for repetitions in launches for s in column(repetitions, phase)]
        listed = " ".join(f"{m:.1f}" for m in each)
        return f"{median(each):.1f} ({listed}; {min(every):.0f}-{max(every):.0f})"

    rows = [
        [
            name,
            *(cell(times[name], phase) for phase in PHASES),
            cell(times[kernels_of(name)], "step"),
            f"{1 - kernels_share(times, name, 'step'):.0%}",
        ]
        for name in algorithms
    ]
    return table(["ms", *PHASES, "its kernels alone", "not kernels"], rows, numbers=1)


def ratios_table(situation: Situation, times: Times, algorithms: Iterable[str], auto: str) -> str:
    """Return the ratios that have targets and then every other step's ratio to the baseline."""
    ratios = list(situation.targets)
    known = [ratio[:3] for ratio in ratios]
    others = (Ratio("step", name) for name in algorithms if name != BASELINE)
    ratios += [ratio for ratio in others if ratio[:3] not in known]
    rows = []
    for ratio in (r for r in ratios if {r.over, *r.under} <= set(times)):
        values = ratio.of_launches(times)
        row = [str(ratio), f"{median(values):.3f}", " ".join(f"{v:.3f}" for v in values)]
        rows.append([*row, *verdict(median(values), ratio.limit)])
    if auto and situation.auto_backward:
        reached = "yes" if auto.startswith(situation.auto_backward) else "NO"
        rows.append(["backward of burst auto", auto, "", situation.auto_backward, reached])
    return table(["ratio", "median", "launches", "target", "reached"], rows)


def verdict(value: float, limit: float | None) -> tuple[str, str]:
    return ("", "") if limit is None else (f"<= {limit:.2f}", "yes" if value <= limit else "NO")


def traffic_table(shares: Sequence[Share]) -> str:
    """Return what each rank sends in a step, as the library and as the devices count it."""
    rows, worst = [], 0.0
    for name in shares[0].traffic:
        payloads, cards, devices = zip(*(share.traffic[name] for share in shares), strict=True)
        off = [sent / payload for sent, payload in zip(devices, payloads, strict=True)]
        worst = max(worst, *(abs(1 - ratio) for ratio in off))
        mebibytes = [" ".join(f"{n / 2**20:.2f}" for n in row) for row in (payloads, cards)]
        rows.append([name, *mebibytes, f"{min(off):.4f} to {max(off):.4f}"])
    head = ["MiB of a step, by rank", "counted payload", "over the card", "all devices / payload"]
    agree = "agree with" if worst <= 0.01 else "DO NOT AGREE with"
    note = f"The interface counters {agree} the counted payload: within {100 * worst:.2f} %."
    return f"{table(head, rows)}\n\n{note}"


def section(situation: Situation, launches: Sequence[Sequence[Share]], busy: float) -> str:
    rate = median(shares[-1].rate for shares in launches)
    times, shares = times_of(launches), launches[0]
    parts = [
        f"## {situation}",
        f"A message of {MESSAGE_BYTES / 1e6:g} MB from the first rank to the last, alone: "
        f"{rate:.0f} Mbit/s. Cores in use before a launch: at most {100 * busy:.0f} %. "
        f"Burst auto: {shares[0].auto or 'not run'}.",
        times_table(times, shares[0].traffic),
        ratios_table(situation, times, shares[0].traffic, shares[0].auto),
    ]
    return "\n\n".join(parts + ([traffic_table(shares)] if situation.mbit else []))


ABOUT = """
{nodes} nodes of {ranks_per_node} ranks, a process with one thread each, over gloo; float32, batch
1, causal, zigzag. Every rank has a card of the given speed to the other nodes, shaped in both
directions (tbf, burst 256 kB), and links without a limit within its node. TCP {congestion} over
plain loopback, reno elsewhere.

Times: median over the launches (median of each launch; fastest to slowest repetition). Each of the
{launches} launches has fresh processes and {repetitions} repetitions, the algorithms in a new order
each time, with a barrier before each forward and each backward. A repetition takes as long as its
slowest rank; step is forward + backward. Ratios: median over the launches of the ratio of medians.
"Kernels alone" are an algorithm's own kernel calls and nothing else, on all ranks at once and in
the same turns; "not kernels" is the share of a step beyond them: waiting, copies, sums, Python. The
hybrids share the heads out over pairs of ranks.
"""


def page(
    args: argparse.Namespace, sections: Sequence[str], found: Sequence[Row], load: str
) -> Page:
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    about = ABOUT.format(**vars(args), congestion=congestion)
    body = "\n\n".join(filter(None, (rates_table(found), *sections)))
    title = "Two nodes on one machine: every algorithm on shaped links"
    return Page(title, about, body, found, origin("cpu", load))


def flags() -> argparse.Namespace:
    made = parser(__doc__, "two_nodes")
    add = made.add_argument
    add("--suite", action="store_true", help="all rates, and what has targets")
    add("--mbit", type=float, default=400, help="of a rank's card; inf: no limit, 0: loopback")
    sizes = {"nodes": 2, "ranks-per-node": 2, "tokens": 512, "heads": 8, "kv-heads": 8}
    for name, number in {**sizes, "head-dim": 64}.items():
        add(f"--{name}", type=int, default=number)
    add("--repetitions", type=int, default=5, help="in each launch")
    add("--launches", type=int, default=5, help="each with fresh processes")
    add("--algorithms", nargs="+", choices=SETTINGS, metavar="NAME")
    add("--force", action="store_true", help="measure under load too")
    args = parse(made, sys.argv[1:])
    if args.nodes * args.ranks_per_node < 2 or not args.mbit >= 0:
        made.error("there must be two ranks, and --mbit must not be negative")
    return args


def measure_all(args: argparse.Namespace) -> None:
    """Measure one situation, or all of the suite, and write the page."""
    asked = Situation(args.mbit, Sizes(args.tokens, args.heads, args.kv_heads, args.head_dim))
    situations = SUITE if args.suite else [next((s for s in SUITE if s == asked), asked)]
    if any(situation.mbit for situation in situations):
        refuse_where_impossible()
    load, sections, found = check_load(args.force), [], []
    for situation in situations:
        text, some = run_situation(situation, args)
        print(text, end="\n\n", flush=True)
        sections.append(text)
        found += some
    if args.suite or args.output:
        page(args, sections, found, load).publish(output(args, "two_nodes"))


def main() -> None:
    args = flags()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        measure_all(args)
    except LinkError as error:
        progress(f"two_nodes: {error}")
        sys.exit(2)
    except RuntimeError as error:
        sys.exit(f"two_nodes: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
