#!/usr/bin/env python
"""Times every algorithm on two nodes that are made of network namespaces of one machine.

    python scripts/bench/two_nodes.py [--mbit 400] [--tokens 512] [--kv-heads 8]
    python scripts/bench/two_nodes.py --suite

Every rank has a card of --mbit Mbit/s to the other nodes and links without a limit to the ranks of
its own node (see shaped_links.py); that needs root and iproute2. --mbit 0 is plain loopback with
all ranks on one node and needs neither. --suite measures all situations that have targets and
writes a page to scripts/bench/results/.
"""

import argparse
import datetime
import multiprocessing
import os
import platform
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from shaped_links import (
    CARD,
    Cluster,
    LinkError,
    bytes_out,
    enter,
    refuse_where_impossible,
    shaped_links,
)
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.plan import Kind, Tile

BASELINE = "ring flat"
TILES = "no communication"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {"algorithm": "ring", "topology": "flat"},
    "ring double": {"algorithm": "ring", "topology": "double"},
    "burst query flat": {"backward": "query", "topology": "flat"},
    "burst query double": {"backward": "query", "topology": "double"},
    "burst kv double": {"backward": "kv", "topology": "double"},
    "burst auto": {},
    "allgather": {"algorithm": "allgather"},
    "ulysses": {"algorithm": "ulysses"},
    TILES: {"algorithm": "ring", "topology": "flat"},
}
PHASES = ("forward", "backward", "step")
PATIENCE_SECONDS = 120.0
MESSAGE_BYTES = 8 * 10**6
MAX_LOAD, MAX_BUSY = 0.5, 0.1
HERE = Path(__file__).resolve().parent

type Seconds = tuple[float, float, float]  # of each of PHASES
type Times = Mapping[str, Sequence[Sequence[Seconds]]]  # by algorithm, launch and repetition


class Ratio(NamedTuple):
    """One algorithm's time over the least of others', and what it shall be at most."""

    phase: str
    over: str
    under: tuple[str, ...] = (BASELINE,)
    limit: float | None = None

    def __str__(self) -> str:
        names = ", ".join(self.under)
        return f"{self.phase}: {self.over} / {names if len(self.under) == 1 else f'min({names})'}"

    def of_launches(self, times: Times) -> list[float]:
        """Return, for each launch, the ratio of the medians over its repetitions."""
        over, *under = (medians(times[name], self.phase) for name in (self.over, *self.under))
        return [a / min(others) for a, *others in zip(over, *under, strict=True)]


@dataclass(frozen=True, slots=True)
class Situation:
    """What is attended to, over what links, and what is expected of it."""

    mbit: float  # 0: plain loopback
    tokens: int  # a rank
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    targets: tuple[Ratio, ...] = field(default=(), compare=False)
    auto_backward: str = field(default="", compare=False)  # what `burst auto` has to choose

    def __str__(self) -> str:
        links = f"{self.mbit:g} Mbit/s" if self.mbit else "plain loopback, one node"
        heads = f"{self.heads} heads, {self.kv_heads} KV heads, head size {self.head_dim}"
        return f"{links}, {self.tokens} tokens a rank, {heads}"

    def algorithms(self, ranks: int) -> list[str]:
        """Return what can run: no double ring on one node, no more ulysses ranks than KV heads."""
        skipped = [] if self.mbit else [name for name in SETTINGS if "double" in name]
        skipped += ["ulysses"] if self.heads % ranks or self.kv_heads % ranks else []
        return [name for name in SETTINGS if name not in skipped]


MHA = (
    Ratio("forward", "ring double", limit=0.55),
    Ratio("backward", "ring double", limit=0.66),
    Ratio("backward", "burst query flat", limit=0.88),
    Ratio("step", "burst auto", limit=0.52),
)
GQA = (Ratio("step", "burst auto", (BASELINE, "ring double"), limit=1.05),)
SUITE = (
    Situation(400, 512, targets=MHA),
    Situation(400, 512, kv_heads=2, targets=GQA, auto_backward="kv"),
    Situation(2000, 1024, targets=(Ratio("step", "burst auto", limit=1.05),)),
    Situation(0, 1024, targets=(Ratio("step", "burst auto", (TILES,), limit=1.20),)),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the processes of one launch are told."""

    situation: Situation
    algorithms: Sequence[str]
    ranks: int
    ranks_per_node: int
    cluster: Cluster | None  # None: no namespaces
    repetitions: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank found in a launch."""

    times: Mapping[str, Sequence[tuple[float, float]]]  # seconds of forward and backward
    traffic: Mapping[str, tuple[int, int, int]]  # bytes: counted payload, by card, by all devices
    rate: float  # Mbit/s of one large message from the first rank to the last, alone
    auto: str  # what `burst auto` chose


class Attention:
    """Attention of one setting on this rank's tokens."""

    def __init__(self, job: Job, name: str, tensors: Sequence[Tensor]) -> None:
        config = BurstConfig(
            **SETTINGS[name], ranks_per_node=job.ranks_per_node, timeout_seconds=PATIENCE_SECONDS
        )
        self.context = BurstContext.create(config)
        q, k, v, self.dout = (self.context.shard(x, dim=1) for x in tensors)
        self.qkv = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def forward(self) -> Any:
        return ring_attention(*self.qkv, self.context, mask=Mask.causal())

    def backward(self, out: Any) -> None:
        torch.autograd.grad(out, self.qkv, self.dout)

    def choice(self) -> str:
        sends = self.context.prepare(*self.qkv, Mask.causal(), 1.0).backward_plan.sends
        kind = Kind.QUERY if any(send.item.kind is Kind.QUERY for send in sends) else Kind.KV
        return f"{kind} backward, {self.context.grid}"


class TilesAlone(Attention):
    """The kernel calls of a setting and nothing else, on local tensors in place of messages."""

    def __init__(self, job: Job, name: str, tensors: Sequence[Tensor]) -> None:
        super().__init__(job, name, tensors)
        out, lse = ring_attention(*self.qkv, self.context, mask=Mask.causal(), return_lse=True)
        q, k, v = self.qkv
        self.qkv, self.finished = (q.detach(), k.detach(), v.detach()), (out.detach(), lse)
        self.call = self.context.prepare(*self.qkv, Mask.causal(), q.shape[-1] ** -0.5)

    def forward(self) -> Any:
        for tile in self.call.forward_plan.tiles:
            self.call.kernel.forward(*self._cut(tile), tile.relation, self.call.scale)

    def backward(self, _: Any) -> None:
        out, lse = self.finished
        for tile in self.call.backward_plan.tiles:
            rows = tile.query_rows.rows
            tensors = (self.dout[:, rows], *self._cut(tile), out[:, rows], lse[:, :, rows])
            self.call.kernel.backward(*tensors, tile.relation, self.call.scale)

    def _cut(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv
        keys = tile.key_rows.rows
        return q[:, tile.query_rows.rows], k[:, keys], v[:, keys]


def be_rank(rank: int, job: Job, number: int, store: str, parent: Connection) -> None:
    """Be one rank of a launch until the parent ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if job.cluster:
        enter(job.cluster.namespace(rank))
    os.environ["GLOO_SOCKET_IFNAME"] = CARD if job.cluster else "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=PATIENCE_SECONDS)
    file = dist.FileStore(store, job.ranks)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=job.ranks, timeout=limit)
    parent.send(measure(rank, job, number))
    parent.poll(None)  # a process that leaves breaks the connections of those that have not ended


def measure(rank: int, job: Job, number: int) -> Share:
    generator, s = torch.Generator().manual_seed(number), job.situation
    whole = [
        torch.randn(1, s.tokens * job.ranks, heads, s.head_dim, generator=generator)
        for heads in (s.heads, s.kv_heads, s.kv_heads, s.heads)
    ]
    runs: dict[str, Attention] = {}
    for name in job.algorithms:
        runs[name] = (TilesAlone if name == TILES else Attention)(job, name, whole)
        runs[name].backward(runs[name].forward())  # makes plans, connections and memory ready
    traffic = {name: count_bytes(run) for name, run in runs.items()}
    rate = median(message_rate(rank, job.ranks) for _ in range(3))
    times = defaultdict(list)
    for repetition in range(job.repetitions):
        if rank == 0:
            progress(f"  launch {number + 1}: repetition {repetition + 1}/{job.repetitions}")
        for name in random.Random(f"{number} {repetition}").sample(list(runs), len(runs)):
            times[name].append(time_once(runs[name]))
    auto = runs["burst auto"].choice() if "burst auto" in runs else ""
    return Share(times, traffic, rate, auto)


def time_once(run: Attention) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward, each after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    out = run.forward()
    forward = time.perf_counter() - start
    dist.barrier()
    start = time.perf_counter()
    run.backward(out)
    return forward, time.perf_counter() - start


def count_bytes(run: Attention) -> tuple[int, int, int]:
    """Return the payload that this rank counts for a step, and what its devices count."""
    dist.barrier()
    payload, before = run.context.bytes_sent, bytes_out()
    run.backward(run.forward())
    dist.barrier()
    sent = {device: total - before[device] for device, total in bytes_out().items()}
    return run.context.bytes_sent - payload, sent.get(CARD, 0), sum(sent.values())


def message_rate(rank: int, ranks: int) -> float:
    """Return at how many Mbit/s the last rank receives a message; of use on that rank alone."""
    message = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        dist.send(message, ranks - 1)
    if rank == ranks - 1:
        dist.recv(message, 0)
    return MESSAGE_BYTES * 8e-6 / (time.perf_counter() - start)


def launch(job: Job, number: int) -> list[Share]:
    """Run one launch in fresh processes; return what each rank found."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once
    context.set_forkserver_preload(["megatron_burst"])
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(job.ranks):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                arguments = (rank, job, number, f"{directory}/store", theirs)
                processes.append(context.Process(target=be_rank, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
            return [pipe.recv() for pipe in pipes]
        except EOFError:
            raise RuntimeError("a rank ended without a result; its error is above") from None
        finally:
            for process in processes:
                process.kill()
                process.join()


def times_of(launches: Sequence[Sequence[Share]]) -> Times:
    """Join the ranks' times: a repetition takes as long as its slowest rank."""
    return {
        name: [slowest([share.times[name] for share in shares]) for shares in launches]
        for name in launches[0][0].traffic
    }


def slowest(ranks: Sequence[Sequence[tuple[float, float]]]) -> list[Seconds]:
    maxima = [tuple(map(max, zip(*r, strict=True))) for r in zip(*ranks, strict=True)]
    return [(forward, backward, forward + backward) for forward, backward in maxima]


def column(repetitions: Sequence[Seconds], phase: str) -> list[float]:
    return [seconds[PHASES.index(phase)] for seconds in repetitions]


def medians(launches: Sequence[Sequence[Seconds]], phase: str) -> list[float]:
    return [median(column(repetitions, phase)) for repetitions in launches]


def run_situation(situation: Situation, args: argparse.Namespace) -> str:
    """Make the links, run the launches, remove the links; return what was found, in Markdown."""
    progress(str(situation))
    ranks, launches, busy = args.nodes * args.ranks_per_node, [], 0.0
    algorithms = args.algorithms or situation.algorithms(ranks)
    links = shaped_links(args.nodes, args.ranks_per_node, situation.mbit)
    with links if situation.mbit else nullcontext() as cluster:
        node = args.ranks_per_node if cluster else ranks
        job = Job(situation, algorithms, ranks, node, cluster, args.repetitions)
        for number in range(args.launches):
            busy = max(busy, busy_share())
            launches.append(launch(job, number))
    return section(situation, launches, busy)


def busy_share(window_seconds: float = 0.5) -> float:
    """Return the share of all cores' time in which they were not idle."""

    def read() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and idle while a disk works

    total, idle = read()
    time.sleep(window_seconds)
    total_now, idle_now = read()
    return 1 - (idle_now - idle) / max(total_now - total, 1)


def check_load(force: bool) -> str:
    """Return the load in words; refuse to measure where others use the machine."""
    load, busy = os.getloadavg()[0], busy_share()
    text = f"{load:.2f} in the last minute, {100 * busy:.0f} % of the cores in use"
    if (load > MAX_LOAD or busy > MAX_BUSY) and not force:
        sys.exit(
            f"two_nodes: the load ({text}) would spoil the times; wait until it is below "
            f"{MAX_LOAD} and {100 * MAX_BUSY:.0f} %, or pass --force"
        )
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def times_table(times: Times) -> str:
    def cell(launches: Sequence[Sequence[Seconds]], phase: str) -> str:
        each = [1e3 * m for m in medians(launches, phase)]
        every = [1e3 * s for repetitions in launches for s in column(repetitions, phase)]
        listed = " ".join(f"{m:.1f}" for m in each)
        return f"{median(each):.1f} ({listed}; {min(every):.0f}-{max(every):.0f})"

    rows = [[name, *(cell(times[name], phase) for phase in PHASES)] for name in times]
    return table(["ms", *PHASES], rows)


def ratios_table(situation: Situation, times: Times, auto: str) -> str:
    """Return the ratios that have targets and then every other step's ratio to the baseline."""
    ratios = list(situation.targets)
    known = [ratio[:3] for ratio in ratios]
    ratios += [r for r in (Ratio("step", n) for n in times if n != BASELINE) if r[:3] not in known]
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
    for name in (n for n in shares[0].traffic if n != TILES):
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
        times_table(times),
        ratios_table(situation, times, shares[0].auto),
    ]
    return "\n\n".join(parts + ([traffic_table(shares)] if situation.mbit else []))


def page(args: argparse.Namespace, sections: Sequence[str], load: str) -> str:
    """Return the sections with all that is needed to measure them again."""
    command = shlex.join(["python", "scripts/bench/two_nodes.py", *sys.argv[1:]])
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return f"""# Attention on two nodes made of network namespaces

{args.nodes} nodes of {args.ranks_per_node} ranks, a process with one thread each, over gloo;
float32, batch 1, causal, zigzag. Every rank has a card of the given speed to the other nodes,
shaped in both directions (tbf, burst 256 kB), and links without a limit within its node.

Times: median over the launches (median of each launch; fastest to slowest repetition). Each of the
{args.launches} launches has fresh processes and {args.repetitions} repetitions, the algorithms in
a new order each time, with a barrier before each forward and each backward. A repetition takes as
long as its slowest rank; step is forward + backward. Ratios: median over the launches of the ratio
of medians. "{TILES}" is the kernel calls of {BASELINE} and nothing else.

* date: {datetime.date.today()}
* device: CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()}
  cores for all ranks; load before: {load}
* versions: torch {torch.__version__}, Python {platform.python_version()}, Linux
  {platform.release()}; TCP reno between ranks in namespaces, {congestion} over plain loopback
* command: `{command}`

{"\n\n".join(sections)}
"""


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=about[0], epilog=about[2])
    parser.add_argument("--suite", action="store_true", help="every situation that has targets")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=400, help="of a rank's card; 0: loopback")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5, help="in each launch")
    parser.add_argument("--launches", type=int, default=3, help="each with fresh processes")
    parser.add_argument("--algorithms", nargs="+", choices=list(SETTINGS), metavar="NAME")
    parser.add_argument("--force", action="store_true", help="measure under load too")
    parser.add_argument("--output", type=Path, help="page; of --suite: DATE_... in results/")
    args = parser.parse_args()
    if min(args.nodes, args.ranks_per_node, args.tokens, args.repetitions, args.launches) < 1:
        parser.error("all counts must be positive")
    if args.nodes * args.ranks_per_node < 2 or args.mbit < 0:
        parser.error("there must be two ranks, and --mbit must not be negative")
    if args.suite and not args.output:
        args.output = HERE / "results" / f"{datetime.date.today()}_cpu_two_nodes.md"
    return args


def main() -> None:
    args = parse()
    asked = Situation(args.mbit, args.tokens, args.heads, args.kv_heads, args.head_dim)
    situations = SUITE if args.suite else [next((s for s in SUITE if s == asked), asked)]
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if any(situation.mbit for situation in situations):
            refuse_where_impossible()
        load = check_load(args.force)
        sections = []
        for situation in situations:
            sections.append(run_situation(situation, args))
            print(sections[-1], end="\n\n", flush=True)
    except LinkError as error:
        progress(f"two_nodes: {error}")
        sys.exit(2)
    except RuntimeError as error:
        sys.exit(f"two_nodes: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(page(args, sections, load))
        print(f"written to {args.output}")


if __name__ == "__main__":
    main()
