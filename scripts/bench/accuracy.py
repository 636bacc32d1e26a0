#!/usr/bin/env python
"""Measures how far attention in bfloat16 is from float64 as the number of ranks grows.

    python scripts/bench/accuracy.py [--tokens 1024] [--head-dim 64] [--ranks 1 2 4 8 16]
    python scripts/bench/accuracy.py --backward kv query --grad-dtype float32 model --nodes 2

The ranks are processes of this machine over gloo.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from algorithms import Place, Sizes, make_context
from harness import Flags, Row, origin, publish, table
from ranks import launch
from torch import Tensor

from megatron_burst import BurstContext, Mask, ring_attention
from megatron_burst.config import Backward, GradDtype
from megatron_burst.kernels import KERNELS
from megatron_burst.tools.gpu_check.stage import relative_error
from megatron_burst.tools.one_rank import OneCall

RESULTS = ("out", "dq", "dk", "dv")


class Case(NamedTuple):
    """What is computed on every number of ranks."""

    heads: str  # query:kv
    backward: str
    grad_dtype: str


def on_ranks(inputs: Sequence[Tensor], context: BurstContext) -> list[Tensor]:
    """Return (out, dq, dk, dv) of causal attention on all ranks; every rank has the inputs."""
    *qkv, dout = (context.shard(x, dim=1).contiguous() for x in inputs)
    qkv = [x.requires_grad_() for x in qkv]
    out = ring_attention(*qkv, context, mask=Mask.causal())
    results = out, *torch.autograd.grad(out, qkv, dout)
    return [context.unshard(x, dim=1) for x in results]


def oracle(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return (out, dq, dk, dv) of dense attention in float64."""
    q, k, v, dout = (x.double() for x in inputs)
    one = OneCall(KERNELS["reference"], (q, k, v, dout))
    return one.forward()[0], *one.backward()


def errors(results: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Return the relative error of each result in the Frobenius norm."""
    return [relative_error(f, e) for f, e in zip(results, expected, strict=True)]


def measure(args: argparse.Namespace, place: Place) -> dict[Case, list[float]]:
    """Be one rank: return the errors of the results, means over the seeds."""
    cases = [Case(*case) for case in product(args.heads, args.backward, args.grad_dtype)]
    contexts = {
        (back, dtype): make_context(
            "burst auto", place, backward=back, grad_dtype=dtype, kernel=args.kernel
        )
        for back, dtype in product(args.backward, args.grad_dtype)
    }
    by_case: dict[Case, list[list[float]]] = {case: [] for case in cases}
    for seed, case in product(range(args.seeds), cases):
        heads = map(int, case.heads.split(":"))
        inputs = Sizes(args.tokens, *heads, args.head_dim).draw("cpu", torch.bfloat16, seed)
        results = on_ranks(inputs, contexts[case[1:]])
        if dist.get_rank() == 0:
            by_case[case].append(errors(results, oracle(inputs)))
    return {case: np.mean(each, axis=0).tolist() for case, each in by_case.items() if each}


def make_rows(
    args: argparse.Namespace, by_ranks: Mapping[int, Mapping[Case, list[float]]]
) -> list[Row]:
    one = by_ranks[1]
    return [
        {
            **case._asdict(),
            "tokens": args.tokens,
            "head_dim": args.head_dim,
            "ranks": ranks,
            "result": name,
            "error": error,
            "ratio": error / one[case][RESULTS.index(name)],
        }
        for ranks, by_case in by_ranks.items()
        for case, each in by_case.items()
        for name, error in zip(RESULTS, each, strict=True)
    ]


def body(rows: Sequence[Row]) -> str:
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        key = *(row[name] for name in Case._fields), row["result"]
        lines.setdefault(key, []).append(f"{row['error']:.3e} ({row['ratio']:.3f})")
    ranks = dict.fromkeys(str(row["ranks"]) for row in rows)
    head = ["heads", "backward", "gradients sent in", "result", *ranks]
    return table(head, ([*key, *cells] for key, cells in lines.items()), words=4)


PAGE = """
# Error of bfloat16 attention against the number of ranks

Relative error (Frobenius norm) of causal attention against dense attention in float64; in brackets
the ratio to one rank, whose one kernel call has the whole sequence. The columns are numbers of
ranks, on {nodes} node(s). {tokens} tokens, head size {head_dim}, kernel {kernel}, mean of {seeds}
seeds, inputs normal with variance 1, zigzag. Accumulation is in float32.

{body}
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = Flags(__doc__)
    add = made.add_argument
    add("--tokens", type=int, default=1024)
    add("--heads", nargs="+", default=["8:8", "8:2", "8:1"], metavar="QUERY:KV")
    add("--head-dim", type=int, default=64)
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--nodes", type=int, default=1, help="more than 1: a double ring")
    add("--backward", nargs="+", choices=[*Backward], default=[Backward.AUTO])
    add("--grad-dtype", nargs="+", choices=[*GradDtype], default=[GradDtype.FLOAT32])
    add("--seeds", type=int, default=3, help="inputs to average over")
    add("--kernel", default="auto", help="as --burst-kernel")
    args = made.read(given)
    if 1 not in args.ranks or any(n > 1 and n % args.nodes for n in args.ranks):
        made.error(f"--ranks {args.ranks}: 1, and multiples of --nodes {args.nodes}")
    return args


def main() -> None:
    args, here = flags(), origin()
    places = [Place(n, max(n // args.nodes, 1)) for n in sorted(args.ranks)]
    rows = make_rows(args, {p.ranks: launch(measure, p.ranks, args, p)[0] for p in places})
    publish(args, "accuracy", PAGE, rows, here, body=body(rows))


if __name__ == "__main__":
    main()
