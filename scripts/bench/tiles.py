#!/usr/bin/env python
"""Times the loops of one rank in the middle of a ring, without messages, against one flash call.

    python scripts/bench/tiles.py
    PYTHONPATH=. python scripts/bench/tiles.py --device cuda

The rank runs the library's own plans, loops, kernels, merges and sums; what would arrive is what
lies in the buffers. Needs torch, one process and this checkout alone.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from algorithms import Kernels, Sizes
from harness import Clock, Flags, Row, in_turns, origin, publish, spread, table

from megatron_burst.config import size_or_auto
from megatron_burst.kernels import Kernel, Request, select_kernel
from megatron_burst.tools.one_rank import OneCall, OneRank

DEFAULTS: Mapping[str, Row] = {
    "cpu": {"ranks": 4, "tokens": 4096, "heads": 8, "head_dim": 64, "kernel": "cpu"},
    "cuda": {"ranks": 8, "tokens": 32768, "heads": 32, "head_dim": 128, "kernel": "cudnn"},
}
LONGEST_CALL = 131072  # tokens; one call on all ranks' would not fit at every length
MATMULS = {"forward": 2, "backward": 5}  # of a pair of tokens, each 2 FLOPs a head and element
ONE_CALL = "one call"

type Job = tuple[int, Callable[[], object]]  # with the pairs of tokens that it computes


def make_jobs(
    sizes: Sizes,
    ranks: int,
    kernel: Kernel,
    device: str,
    dtype: torch.dtype,
    blocks_per_call: int | None,
) -> dict[tuple[str, str], Job]:
    """Return everything to be timed, by phase and what it is."""
    tensors = sizes.draw(device, dtype)
    jobs: dict[tuple[str, str], Job] = {}
    for kind in ("kv", "query"):
        name = kernel.name.split(" ")[0]  # where it pads, that of the inner one
        given = [0] * ranks, tensors, kind, "flat", name, blocks_per_call
        rank = OneRank(*given)
        alone = Kernels(rank.call, *tensors)
        rank.forward()
        if kind == "kv":
            jobs["forward", "ring"] = rank.pairs, rank.forward
            jobs["forward", "its kernels"] = rank.pairs, alone.forward
        jobs["backward", f"{kind} ring"] = rank.pairs, rank.backward
        jobs["backward", f"its kernels, {kind}"] = rank.pairs, alone.backward
    longest = sizes._replace(tokens=min(ranks * sizes.tokens, LONGEST_CALL))
    one = OneCall(kernel, longest, device, dtype)
    jobs["forward", ONE_CALL] = one.pairs, one.forward
    jobs["backward", ONE_CALL] = one.pairs, one.backward
    return jobs


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for everything that is timed in turns."""
    dtype = getattr(torch, args.dtype)
    sizes = Sizes(args.tokens, args.heads, args.kv_heads or args.heads, args.head_dim)
    head_dims = sizes.head_dim, sizes.head_dim
    request = Request(torch.device(args.device), dtype, sizes.heads, sizes.kv_heads, *head_dims)
    kernel = select_kernel(args.kernel, request)
    jobs = make_jobs(sizes, args.ranks, kernel, args.device, dtype, args.blocks_per_call)
    clock = Clock(args.device)
    ways = {name: partial(clock.seconds, run) for name, (_, run) in jobs.items()}
    times = in_turns(ways, args.repetitions)
    for (phase, what), (pairs, _) in jobs.items():
        whole, its_pairs = times[phase, ONE_CALL], jobs[phase, ONE_CALL][0]
        ratios = [a / b for a, b in zip(times[phase, what], whole, strict=True)]
        found = spread(times[phase, what])
        flops = MATMULS[phase] * 2 * sizes.heads * sizes.head_dim * pairs
        yield {
            "benchmark": "tiles",
            "kernel": kernel.name,
            "dtype": args.dtype,
            "ranks": args.ranks,
            **sizes._asdict(),
            "phase": phase,
            "what": what,
            **found,
            "tflops": flops / found["median_s"] / 1e12,
            "ratio": median(ratios) * its_pairs / pairs,
            "repetitions": args.repetitions,
        }


def body(found: Sequence[Row]) -> str:
    lines = (
        (
            *(f"{row['phase']}: {row['what']}", f"{row['median_s']:.4f}"),
            *(f"{row['tflops']:.4g}", f"{row['ratio']:.3f}"),
        )
        for row in found
    )
    return table(["what", "s", "TFLOP/s", "time a pair of tokens"], lines)


PAGE = """
# The tiles of a ring against one flash call

Causal attention over {ranks} ranks (zigzag, flat ring, gradients return straight home), {tokens}
tokens a rank, {heads} heads of {head_dim}, {kv} KV heads, {dtype}, kernel {kernel}: the loops of
rank {rank}, with all merges and sums but no messages, its kernel calls alone, and one causal call
of the same kernel on the tokens of all ranks, or on {longest} where they have more. Medians of
{repetitions} repetitions that take turns; CPU time of one thread, on a GPU the time between CUDA
events. "Time a pair of tokens": over that of the one call for each (query, key) pair that is
computed, the median of the repetitions' ratios. FLOP/s count 4 forward and 10 backward for each
pair, head and element of the head size.

{body}
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = Flags(__doc__)
    add = made.add_argument
    add("--device", choices=[*DEFAULTS], default="cpu")
    for name in ("--ranks", "--tokens", "--heads", "--kv-heads", "--head-dim"):
        add(name, type=int)
    add("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    add("--kernel", help="as --burst-kernel")
    add("--blocks-per-call", type=size_or_auto, help="as --burst-blocks-per-call")
    return made.read(given, DEFAULTS)


def main() -> None:
    args = flags()
    here, found = origin(args.device), list(measure(args))
    words = {"rank": args.ranks // 2, "longest": LONGEST_CALL, "kv": args.kv_heads or args.heads}
    publish(args, "tiles", PAGE, found, here, body=body(found), **words)


if __name__ == "__main__":
    main()
