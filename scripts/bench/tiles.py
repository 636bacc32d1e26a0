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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from in_memory import InMemory, LocalTransfers, Template
from page import Page, Row, origin, output, parse, parser, table
from timed_kernel import TimedKernel, mark, seconds
from torch import Tensor
from turns import in_turns, spread

from megatron_burst import Mask
from megatron_burst.attention.backward import backward
from megatron_burst.attention.context import AttentionCall
from megatron_burst.attention.forward import forward
from megatron_burst.config import GradientReturn
from megatron_burst.kernels import Kernel, Request, TileCall, select_kernel
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Band
from megatron_burst.plans.plan import Kind, Plan, Receive, assemble
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling, half_and_quarters
from megatron_burst.plans.topology import flat_grid
from megatron_burst.transport.blocks import Block

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


type Buffers = dict[tuple[Kind, int], Block]


class OwnCopies(LocalTransfers):
    """Sends nothing. Blocks arrive as copies of the rank's own, gradients as what lies there.

    The buffers are kept from the first use on.
    """

    def __init__(self, buffers: Buffers, template: Template) -> None:
        super().__init__()
        self._buffers, self._template = buffers, template

    def take(self, receive: Receive) -> Block:
        kind = receive.item.kind
        if (kind, receive.buffer) not in self._buffers:
            self._buffers[kind, receive.buffer] = tuple(
                t.new_zeros(t.shape) if kind.is_gradient else t.clone()
                for t in self._template(receive.item)
            )
        return self._buffers[kind, receive.buffer]


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


class Sample(NamedTuple):
    """What one repetition of one thing took."""

    seconds: float
    in_kernels: float
    calls: int
    pairs: int


type Times = Mapping[tuple[str, str], Sequence[Sample]]  # by phase and what


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
type Jobs = dict[tuple[str, str], Callable[[], object]]  # by phase and what


def make_jobs(case: Case, kernel: Kernel) -> Jobs:
    """Return everything to be timed; the results that a backward needs are made here."""
    tiling = Tiling(zigzag(case.ranks * case.tokens, case.ranks), Mask.causal())
    grid = flat_grid(case.ranks)
    rings = {kind: Ring(tiling, grid, kind, case.back) for kind in (Kind.KV, Kind.QUERY)}
    buffers: Buffers = {}
    communicator = InMemory(lambda template: OwnCopies(buffers, template))

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
    return jobs


def one_call(case: Case, kernel: Kernel) -> Jobs:
    """Return the forward and the backward of one flash call."""
    q, k, v, dout = case.draw(case.tokens_of_one_call)
    tile = TileCall(q, k, v, Band.CAUSAL, case.scale)
    out, lse = kernel.forward(tile)
    return {
        ("forward", "one call"): lambda: kernel.forward(tile),
        ("backward", "one call"): lambda: kernel.backward(tile, dout, out, lse),
    }


def own_tile(case: Case, kernel: Kernel, shard: Tensors, communicator: InMemory) -> Jobs:
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


def measure(case: Case, repetitions: int) -> Times:
    """Run all jobs in turns; the first round warms up and does not count.

    Raises:
        ValueError: the kernel cannot serve the case.
    """
    request = Request.of(*(x[:, :1] for x in case.draw(1)[:3]))
    kernel = TimedKernel(select_kernel(case.kernel, request), case.device)

    def timed(job: Callable[[], object]) -> Sample:
        kernel.calls, kernel.pairs = [], 0
        start = mark(case.device)
        job()
        took = seconds(start, mark(case.device))
        in_kernels = sum(seconds(*call) for call in kernel.calls)
        return Sample(took, in_kernels, len(kernel.calls), kernel.pairs)

    ways = {name: partial(timed, job) for name, job in make_jobs(case, kernel).items()}
    return in_turns(ways, repetitions)


def rows(case: Case, times: Times) -> Iterator[Row]:
    """Yield the comparisons of one case."""
    for phase, what, against in COMPARISONS:
        pairs = [*zip(times[phase, what], times[phase, against], strict=True)]
        ours, theirs = pairs[0]
        work = ours.pairs / theirs.pairs
        ratios = [a.seconds / b.seconds / work for a, b in pairs]
        found, other = (spread([s.seconds for s in each]) for each in zip(*pairs, strict=True))
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
            "in_kernels": median(a.in_kernels / a.seconds for a, _ in pairs),
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
