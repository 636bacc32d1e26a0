#!/usr/bin/env python
"""Times the tile loops of the ranks, without messages, against one flash call.

    python scripts/bench/tiles.py
    PYTHONPATH=. python scripts/bench/tiles.py --device cuda

The ranks run the library's own plans, loops, kernels, merges and sums, one after another in this
process; what would arrive lies in local buffers. On the CPU it is the CPU time of all ranks, on a
GPU that of one rank in the middle, between CUDA events. Repetitions of all that is compared take
turns. Writes a page and its CSV. Needs torch and this checkout alone.
"""

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from page import Page, Row, origin, output, parse, parser, table
from torch import Tensor
from turns import spread

from megatron_burst import Mask
from megatron_burst.attention.backward import backward
from megatron_burst.attention.context import AttentionCall
from megatron_burst.attention.forward import forward
from megatron_burst.config import GradientReturn
from megatron_burst.kernels import Kernel, Request, TileCall, select_kernel
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Band
from megatron_burst.plans.plan import Item, Kind, Plan, Receive, Step, assemble
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling, half_and_quarters
from megatron_burst.plans.topology import flat_grid
from megatron_burst.transport.blocks import Block
from megatron_burst.transport.comm import Communicator, Transfers

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "ranks": 4,
        "tokens_per_rank": [4096],
        "heads": 8,
        "kv_heads": [8],
        "head_dim": 64,
        "dtype": ["float32", "bfloat16"],
        "kernel": ["cpu"],
        "repetitions": 9,
    },
    "cuda": {
        "ranks": 8,
        "tokens_per_rank": [16384, 131072],
        "heads": 32,
        "kv_heads": [32, 8],
        "head_dim": 128,
        "dtype": ["bfloat16"],
        "kernel": ["cudnn", "aten_flash"],
        "repetitions": 5,
    },
}
LONGEST_CALL = 131072  # tokens; one call on all ranks' would not fit at every length
MATMULS = {"forward": 2, "backward": 5}  # of a pair of tokens, each 2 FLOPs a head and element

type Tensors = tuple[Tensor, ...]


class LocalCommunicator(Communicator):
    """Has in memory, from the first use on, whatever a plan receives."""

    def __init__(self) -> None:
        super().__init__((), {}, timeout_seconds=1)
        self._buffers: dict[tuple[Kind, int], Block] = {}

    def begin(self, name: str, plan: Plan, template: Callable[[Item], Block]) -> Transfers:
        return LocalTransfers(self._buffers, template)


class LocalTransfers(Transfers):
    """Sends nothing. Blocks arrive as copies of the rank's own, gradients as what lies there."""

    def __init__(
        self, buffers: dict[tuple[Kind, int], Block], template: Callable[[Item], Block]
    ) -> None:
        self._arrived, self._template = buffers, template
        self._landing: dict[int, list[Receive]] = defaultdict(list)

    def post(self, number: int, step: Step, outgoing: Mapping[Item, Block]) -> None:
        for receive in step.receives:
            self._landing[receive.lands].append(receive)

    def land(self, number: int) -> list[tuple[Item, Block]]:
        return [(r.item, self._buffer(r)) for r in self._landing.pop(number, [])]

    def _buffer(self, receive: Receive) -> Block:
        kind = receive.item.kind
        if (kind, receive.buffer) not in self._arrived:
            self._arrived[kind, receive.buffer] = tuple(
                t.new_zeros(t.shape) if kind.is_gradient else t.clone()
                for t in self._template(receive.item)
            )
        return self._arrived[kind, receive.buffer]


def mark(device: str) -> Any:
    """Return this moment: CPU seconds of the process, or an event of the current stream."""
    if device == "cpu":
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class TimedKernel:
    """A kernel that notes when each call began and ended, and counts its pairs of tokens."""

    def __init__(self, kernel: Kernel, device: str) -> None:
        self.name = kernel.name
        self._kernel, self._device = kernel, device
        self.calls: list[tuple[Any, Any]] = []
        self.pairs = 0

    def reasons_against(self, request: Request) -> list[str]:
        return self._kernel.reasons_against(request)

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        start = mark(self._device)
        result = self._kernel.forward(tile)
        self._note(start, tile)
        return result

    def backward(
        self, tile: TileCall, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        start = mark(self._device)
        result = self._kernel.backward(tile, dout, out, lse)
        self._note(start, tile)
        return result

    def _note(self, start: Any, tile: TileCall) -> None:
        self.calls.append((start, mark(self._device)))
        self.pairs += tile.band.pairs(tile.q.shape[1], tile.k.shape[1])


@dataclass(frozen=True)
class Case:
    """What is attended to, and by which kernel."""

    kernel: str
    dtype: str
    back: GradientReturn
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int  # of a rank
    ranks: int
    device: str

    @property
    def tokens_of_one_call(self) -> int:
        return min(self.ranks * self.tokens, LONGEST_CALL)

    @property
    def ranks_run(self) -> range:
        """All on the CPU, so that their work is that of the one call; else the middle one."""
        middle = self.ranks // 2
        return range(self.ranks) if self.device == "cpu" else range(middle, middle + 1)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def draw(self, tokens: int) -> Tensors:
        """Return q, k, v and dout, normal with variance 1."""
        dtype = getattr(torch, self.dtype)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, tokens, n, self.head_dim) for n in heads]
        return tuple(torch.randn(shape, device=self.device).to(dtype) for shape in shapes)

    def flops(self, phase: str, pairs: int) -> int:
        return MATMULS[phase] * 2 * self.heads * self.head_dim * pairs

    @property
    def columns(self) -> Row:
        given = {name: value for name, value in asdict(self).items() if name != "device"}
        return {**given, "back": str(self.back)}


class Times(NamedTuple):
    """What one thing took, by repetition."""

    seconds: list[float]
    in_kernels: list[float]
    calls: int
    pairs: int


class Comparison(NamedTuple):
    """Two of the things that were timed."""

    phase: str
    what: str
    against: str


COMPARISONS = (
    Comparison("forward", "tiles", "one call"),
    Comparison("backward", "tiles, kv ring", "one call"),
    Comparison("backward", "tiles, query ring", "one call"),
    Comparison("backward", "own tile in parts", "own tile in one"),
)
# What is compared runs one after the other, in case the machine changes its pace.
IN_TURN = tuple(dict.fromkeys((c.phase, what) for c in COMPARISONS for what in (c.what, c.against)))

type Jobs = dict[tuple[str, str], Callable[[], object]]  # by phase and what


def make_jobs(case: Case, kernel: Kernel) -> Jobs:
    """Return everything to be timed; the results that a backward needs are made here."""
    tiling = Tiling(zigzag(case.ranks * case.tokens, case.ranks), Mask.causal())
    grid = flat_grid(case.ranks)
    rings = {kind: Ring(tiling, grid, kind, case.back) for kind in (Kind.KV, Kind.QUERY)}
    communicator = LocalCommunicator()

    def call(rank: int, kind: Kind) -> AttentionCall:
        plans = rings[Kind.KV].forward(rank), rings[kind].backward(rank)
        return AttentionCall(*plans, kernel, case.scale, communicator)

    calls = {kind: [call(rank, kind) for rank in case.ranks_run] for kind in rings}
    shards = [case.draw(case.tokens) for _ in case.ranks_run]
    results = [
        forward(q, k, v, one) for (q, k, v, _), one in zip(shards, calls[Kind.KV], strict=True)
    ]

    def tiles_forward() -> None:
        for (q, k, v, _), one in zip(shards, calls[Kind.KV], strict=True):
            forward(q, k, v, one)

    def tiles_backward(kind: Kind) -> None:
        for (q, k, v, dout), result, one in zip(shards, results, calls[kind], strict=True):
            backward(dout, q, k, v, *result, one)

    jobs: Jobs = {
        ("forward", "tiles"): tiles_forward,
        ("backward", "tiles, kv ring"): lambda: tiles_backward(Kind.KV),
        ("backward", "tiles, query ring"): lambda: tiles_backward(Kind.QUERY),
    }
    jobs |= one_call(case, kernel) | own_tile(case, kernel, shards[0], communicator)
    return {name: jobs[name] for name in IN_TURN}


def one_call(case: Case, kernel: Kernel) -> Jobs:
    """Return the forward and the backward of one flash call."""
    q, k, v, dout = case.draw(case.tokens_of_one_call)
    tile = TileCall(q, k, v, Band.CAUSAL, case.scale)
    out, lse = kernel.forward(tile)
    return {
        ("forward", "one call"): lambda: kernel.forward(tile),
        ("backward", "one call"): lambda: kernel.backward(tile, dout, out, lse),
    }


def own_tile(case: Case, kernel: Kernel, shard: Tensors, communicator: Communicator) -> Jobs:
    """Return the backward of a rank's own causal tile, in one and in a half and two quarters."""
    q, k, v, dout = shard
    out, lse = kernel.forward(TileCall(q, k, v, Band.CAUSAL, case.scale))
    (own,) = Tiling(zigzag(case.ranks * case.tokens, case.ranks), Mask.causal())(0, 0)
    plans: dict[str, Plan] = {
        "own tile in one": assemble(0, [], {0: (own,)}),
        "own tile in parts": assemble(0, [], {0: sum(half_and_quarters([own]), [])}),
    }

    def run(plan: Plan) -> None:
        call = AttentionCall(plan, plan, kernel, case.scale, communicator)
        backward(dout, q, k, v, out, lse, call)

    return {("backward", name): lambda plan=plan: run(plan) for name, plan in plans.items()}  # type: ignore[misc]


def measure(case: Case, repetitions: int) -> dict[tuple[str, str], Times]:
    """Run all jobs in turns; the first round warms up and does not count.

    Raises:
        ValueError: the kernel cannot serve the case.
    """
    request = Request.of(*(x[:, :1] for x in case.draw(1)[:3]))
    kernel = TimedKernel(select_kernel(case.kernel, request), case.device)
    jobs = make_jobs(case, kernel)
    times: dict[tuple[str, str], Times] = {}
    for repetition in range(1 + repetitions):
        for name, job in list(jobs.items())[:: 1 if repetition % 2 else -1]:
            kernel.calls, kernel.pairs = [], 0
            start = mark(case.device)
            job()
            end = mark(case.device)
            if repetition == 0:
                times[name] = Times([], [], len(kernel.calls), kernel.pairs)
            else:
                times[name].seconds.append(seconds(start, end))
                times[name].in_kernels.append(sum(seconds(*call) for call in kernel.calls))
    return times


def rows(case: Case, times: Mapping[tuple[str, str], Times]) -> Iterator[Row]:
    """Yield the comparisons of one case."""
    for phase, what, against in COMPARISONS:
        ours, theirs = times[phase, what], times[phase, against]
        work = ours.pairs / theirs.pairs
        ratios = [a / b / work for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
        found, other = spread(ours.seconds), spread(theirs.seconds)
        yield {
            "benchmark": "tiles",
            **case.columns,
            "phase": phase,
            "what": what,
            "calls": ours.calls,
            **found,
            "tflops": case.flops(phase, ours.pairs) / found["median_s"] / 1e12,
            "against": against,
            **{f"against_{name}": seconds for name, seconds in other.items()},
            "against_tflops": case.flops(phase, theirs.pairs) / other["median_s"] / 1e12,
            "ratio": median(ratios),
            "least_ratio": min(ratios),
            "largest_ratio": max(ratios),
            "ratio_of_least": found["least_s"] / other["least_s"] / work,
            "in_kernels": median(k / s for k, s in zip(ours.in_kernels, ours.seconds, strict=True)),
            "repetitions": len(ratios),
        }


HEAD = "kernel, dtype, heads, tokens a rank, what, takes, against, takes, time a pair of tokens, "
HEAD += "the same of the least times, share of its FLOP/s, in kernels"


def results(found: Sequence[Row]) -> str:
    """Return the table."""
    return table(
        HEAD.split(", "),
        (
            (
                row["kernel"],
                row["dtype"],
                f"{row['heads']}:{row['kv_heads']} x {row['head_dim']}",
                f"{row['tokens']}",
                f"{row['phase']}: {row['what']}",
                f"{row['median_s']:.4f} s, {row['tflops']:.4g} TFLOP/s in {row['calls']} calls",
                row["against"],
                f"{row['against_median_s']:.4f} s, {row['against_tflops']:.4g} TFLOP/s",
                f"{row['ratio']:.3f} ({row['least_ratio']:.3f} … {row['largest_ratio']:.3f})",
                f"{row['ratio_of_least']:.3f}",
                f"{1 / row['ratio']:.1%}",
                f"{row['in_kernels']:.1%}",
            )
            for row in found
        ),
    )


def measure_all(args: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Measure every case; return the rows, and what no kernel can serve."""
    found: list[Row] = []
    refused = []
    for case in cases(args):
        try:
            times = measure(case, args.repetitions)
        except ValueError as error:
            refused.append(f"```\n{error}\n```")
        else:
            found += rows(case, times)
            print(results(found[-len(COMPARISONS) :]), flush=True)
    return found, refused


def cases(args: argparse.Namespace) -> list[Case]:
    same = (args.back, args.heads)
    return [
        Case(kernel, dtype, *same, kv_heads, args.head_dim, tokens, args.ranks, args.device)
        for kernel in args.kernel
        for dtype in args.dtype
        for kv_heads in args.kv_heads
        for tokens in args.tokens_per_rank
    ]


ABOUT = """
Causal attention over {ranks} ranks (zigzag, flat ring, gradients return by {back}): the loops of
{which}, with all merges and sums but no messages, against one causal call of the same kernel on the
tokens of all ranks, or on {longest} where they have more. Medians of {repetitions} repetitions that
take turns; {clock}. "Time a pair of tokens": ours over theirs for each (query, key) pair that is
computed, the median of the repetitions' ratios and in brackets the least and the most; the target
is at most 1.05. Beside it the ratio of the least times, which others on the machine disturb least.
FLOP/s count 4 forward and 10 backward for each pair, head and element of the head size. "In
kernels": the share of the loop's time; the rest is merges, sums and Python. "In parts" is how a
backward that has messages splits its own causal tile.
"""


def page(args: argparse.Namespace) -> Page:
    here, cpu = origin(args.device), args.device == "cpu"
    found, refused = measure_all(args)
    here["load"] += f", after {os.getloadavg()[0]:.2f}"
    about = ABOUT.format(
        **vars(args),
        which=f"all {args.ranks} ranks, one after another" if cpu else f"rank {args.ranks // 2}",
        longest=LONGEST_CALL,
        clock="CPU time of one thread" if cpu else "time between CUDA events",
    )
    body = "\n\n".join([results(found), *refused])
    return Page("The tiles of a ring against one flash call", about, body, found, here)


def flags(arguments: list[str]) -> argparse.Namespace:
    made = parser(__doc__, "tiles")
    add = made.add_argument
    add("--device", choices=[*DEFAULTS], default="cpu")
    for name in ("--ranks", "--heads", "--head-dim", "--repetitions"):
        add(name, type=int)
    for name in ("--tokens-per-rank", "--kv-heads"):
        add(name, type=int, nargs="+")
    add("--dtype", nargs="+", choices=["float32", "bfloat16", "float16"])
    add("--kernel", nargs="+", help="as --burst-kernel")
    add(
        "--return",
        type=GradientReturn,
        choices=[GradientReturn.CHAIN, GradientReturn.HOME],
        default=GradientReturn.HOME,
        dest="back",
        help="how gradients are returned; default: home, burst's own on one node",
    )
    args = parse(made, arguments, DEFAULTS)
    if args.device == "cuda" and not torch.cuda.is_available():
        made.error("--device cuda: torch finds no GPU")
    return args


def main() -> None:
    args = flags(sys.argv[1:])
    torch.set_num_threads(1)  # CPU time is then that of one core
    torch.manual_seed(0)
    page(args).publish(output(args, "tiles"))


if __name__ == "__main__":
    main()
