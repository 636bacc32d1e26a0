#!/usr/bin/env python
"""Measures how far attention in bfloat16 is from float64 as the number of ranks grows.

    python scripts/bench/accuracy.py [--tokens 1024] [--head-dim 64] [--ranks 1 2 4 8 16]
    python scripts/bench/accuracy.py --ring kv query --return chain home \\
        --grad-dtype float32 model --nodes 1 2 4

The ranks are threads of this process. They run the library's own plans, loops, kernels, merges and
sums; only the transport is another one: what a rank sends is handed over in memory. The yardstick
is the same kernel in one call on the whole sequence. Writes a page and its CSV.
"""

import argparse
import queue
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from in_memory import InMemory, LocalTransfers
from page import Page, Row, origin, output, parse, parser, table
from torch import Tensor

from megatron_burst import Mask
from megatron_burst.attention.backward import backward
from megatron_burst.attention.context import AttentionCall
from megatron_burst.attention.forward import forward
from megatron_burst.config import GradDtype, GradientReturn
from megatron_burst.kernels import Kernel, Request, TileCall, select_kernel
from megatron_burst.plans.cost import Shape, traffic
from megatron_burst.plans.layout import zigzag
from megatron_burst.plans.mask import Band
from megatron_burst.plans.plan import Item, Kind, Receive, Step
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid, by_node
from megatron_burst.transport.blocks import Block

RESULTS = ("out", "dq", "dk", "dv")
TRAVELLING = {Kind.KV: ("dk", "dv"), Kind.QUERY: ("dq",)}
PATIENCE_SECONDS = 120
BYTES_TOKENS = 65536  # tokens of a rank in the table of bytes, which grow in proportion

type Tensors = tuple[Tensor, ...]
type Wires = Mapping[tuple[int, int, Item], queue.SimpleQueue[Block]]
type Errors = dict[str, float]  # by the names in RESULTS


class Way(NamedTuple):
    """What travels in the backward, and how its gradients do."""

    ring: Kind
    dtype: GradDtype
    back: GradientReturn


class Heads(NamedTuple):
    query: int
    kv: int

    def __str__(self) -> str:
        return f"{self.query}:{self.kv}"


class WireTransfers(LocalTransfers):
    """Hands references to the other ranks' threads, and so has no buffers.

    Nothing needs a copy. Blocks are never written to. A gradient's receiver may write to it, but it
    is the only one that has it then: the sender hands on its sum and starts anew.
    """

    def __init__(self, rank: int, wires: Wires) -> None:
        super().__init__()
        self._rank, self._wires = rank, wires

    def post(self, number: int, step: Step, outgoing: Mapping[Item, Block]) -> None:
        for send in step.sends:
            self._wires[self._rank, send.peer, send.item].put(outgoing[send.item])
        super().post(number, step, outgoing)

    def take(self, receive: Receive) -> Block:
        wire = self._wires[receive.peer, self._rank, receive.item]
        return wire.get(timeout=PATIENCE_SECONDS)


def ring(inputs: Tensors, grid: Grid, way: Way, kernel: Kernel) -> Tensors:
    """Return (out, dq, dk, dv) of causal attention computed by the ranks of `grid`."""
    layout = zigzag(inputs[0].shape[1], grid.ranks)
    tiling = Tiling(layout, Mask.causal())
    there, back = Ring(tiling, grid), Ring(tiling, grid, way.ring, way.back)
    hops = [*there.reads(), *back.reads(), *back.gradients()]
    wires = {(h.source, h.target, h.item): queue.SimpleQueue[Block]() for h in hops}

    def one_rank(rank: int) -> Tensors:
        q, k, v, dout = (layout.shard(x, rank, dim=1) for x in inputs)
        call = AttentionCall(
            there.forward(rank),
            back.backward(rank),
            kernel,
            q.shape[-1] ** -0.5,
            InMemory(lambda _: WireTransfers(rank, wires)),
            q.dtype if way.dtype is GradDtype.MODEL else None,
        )
        out, lse = forward(q, k, v, call)
        return out, *backward(dout, q, k, v, out, lse, call)

    with ThreadPoolExecutor(max_workers=grid.ranks) as threads:
        shares = list(threads.map(one_rank, range(grid.ranks)))
    return tuple(layout.unshard([share[i] for share in shares], dim=1) for i in range(4))


def whole(inputs: Tensors, kernel: Kernel) -> Tensors:
    """Return (out, dq, dk, dv) of one call of the kernel on the whole sequence."""
    q, k, v, dout = inputs
    scale = q.shape[-1] ** -0.5
    tile = TileCall(q, k, v, Band.CAUSAL, scale)
    out, lse = kernel.forward(tile)
    return out, *kernel.backward(tile, dout, out, lse)


def oracle(inputs: Tensors) -> Tensors:
    """Return (out, dq, dk, dv) of dense attention in float64 by autograd."""
    q, k, v, dout = (x.double().requires_grad_() for x in inputs)
    k_all, v_all = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) * q.shape[-1] ** -0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, v_all)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def make_inputs(args: argparse.Namespace, heads: Heads, seed: int) -> Tensors:
    """Draw q, k, v and dout, normal with variance 1, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, args.tokens, n, args.head_dim, generator=generator).to(
            args.device, torch.bfloat16
        )
        for n in (heads.query, heads.kv, heads.kv, heads.query)
    )


def errors(found: Tensors, expected: Tensors) -> Errors:
    """Return the relative error of each result in the Frobenius norm."""
    pairs = zip(RESULTS, found, expected, strict=True)
    return {name: ((f.double() - e).norm() / e.norm()).item() for name, f, e in pairs}


def mean(measured: list[Errors]) -> Errors:
    return {name: sum(one[name] for one in measured) / len(measured) for name in RESULTS}


def measure(
    args: argparse.Namespace, heads: Heads, grids: Mapping[str, Grid]
) -> tuple[Errors, dict[Way, dict[str, Errors]]]:
    """Return the mean errors of one call, and those of every way on every grid."""
    one_call: list[Errors] = []
    rings: dict[tuple[Way, str], list[Errors]] = defaultdict(list)
    for seed in range(args.seeds):
        inputs = make_inputs(args, heads, seed)
        kernel = select_kernel(args.kernel, Request.of(*inputs[:3]))
        expected = oracle(inputs)
        one_call.append(errors(whole(inputs, kernel), expected))
        for way in ways(args):
            for name, grid in grids.items():
                found = ring(inputs, grid, way, kernel)
                rings[way, name].append(errors(found, expected))
    by_way = {way: {name: mean(rings[way, name]) for name in grids} for way in ways(args)}
    return mean(one_call), by_way


def ways(args: argparse.Namespace) -> list[Way]:
    return [
        Way(*way) for way in ((r, d, b) for r in args.ring for d in args.dtype for b in args.back)
    ]


def grids(args: argparse.Namespace) -> dict[str, Grid]:
    """Return flat rings of every number of ranks, and double rings of the largest, by name."""
    most = max(args.ranks)
    flat = {str(ranks): by_node([0] * ranks) for ranks in args.ranks if 1 in args.nodes}
    double = {f"{n} x {most // n}": by_node(nodes_of(most, n)) for n in args.nodes if n > 1}
    return {name: Grid(rows) for name, rows in (flat | double).items()}


def nodes_of(ranks: int, nodes: int) -> list[int]:
    """Return the node of each rank."""
    return [rank * nodes // ranks for rank in range(ranks)]


def error_rows(args: argparse.Namespace) -> list[Row]:
    """Measure all: a row for each result, way and grid."""
    shapes = grids(args)
    found: list[Row] = []
    for heads in args.heads:
        one, by_way = measure(args, heads, shapes)
        for kind in args.ring:
            for name in RESULTS:
                for way, travels in _ways_of(by_way, kind, name):
                    for grid in shapes:
                        error = by_way[way][grid][name]
                        found.append(
                            {
                                "benchmark": "accuracy",
                                "measured": "error",
                                **_columns(args, heads, way),
                                "grid": grid,
                                "result": name,
                                "travels": travels,
                                "one_call": one[name],
                                "error": error,
                                "ratio": error / one[name],
                            }
                        )
    return found


def _columns(args: argparse.Namespace, heads: Heads, way: Way) -> Row:
    given = {"heads": str(heads), "head_dim": args.head_dim, "ring": str(way.ring)}
    return {**given, "grad_dtype": str(way.dtype), "return": str(way.back)}


def _ways_of(by_way: Mapping[Way, object], kind: Kind, name: str) -> Iterator[tuple[Way, bool]]:
    """Yield the ways of a ring, and whether this result travels; what does not is alike for all."""
    of_ring = [way for way in by_way if way.ring is kind]
    travels = name in TRAVELLING[kind]
    yield from ((way, travels) for way in (of_ring if travels else of_ring[:1]))


def error_table(found: Sequence[Row]) -> str:
    """Return the errors in Markdown, each with its ratio to that of one call."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        label = f"{row['grad_dtype']}, {row['return']}" if row["travels"] else "stays"
        key = (row["heads"], row["ring"], row["result"], label, f"{row['one_call']:.3e}")
        lines.setdefault(key, []).append(f"{row['error']:.3e} ({row['ratio']:.3f})")
    shapes = dict.fromkeys(row["grid"] for row in found)
    head = ["heads", "ring", "result", "gradients travel", "one call", *shapes]
    return table(head, ([*key, *cells] for key, cells in lines.items()))


def bytes_rows(args: argparse.Namespace) -> list[Row]:
    """Count what the ranks send in one backward."""
    ranks, nodes = max(args.ranks), _nodes_of_bytes(args)
    flat, double = Grid(by_node([0] * ranks)), Grid(by_node(nodes_of(ranks, nodes)))
    return [
        {
            "benchmark": "accuracy",
            "measured": "bytes",
            **_columns(args, heads, way),
            "grid": str(grid),
            **_bytes(args, heads, grid, way),
        }
        for heads in args.heads
        for grid in (flat, double)
        for way in ways(args)
    ]


def bytes_table(args: argparse.Namespace, found: Sequence[Row]) -> str:
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in found:
        key = (row["heads"], row["grid"], row["ring"], row["grad_dtype"])
        places = (f"{row[place] / 2**20:.0f}" for place in ("card", "node", "rank"))
        lines.setdefault(key, []).append(" / ".join(places))
    head = ["heads", f"on {_nodes_of_bytes(args)} nodes", "ring", "gradients travel in", *args.back]
    return table(head, ([*key, *cells] for key, cells in lines.items()), numbers=4)


def _bytes(args: argparse.Namespace, heads: Heads, grid: Grid, way: Way) -> Row:
    tiling = Tiling(zigzag(2 * grid.ranks, grid.ranks), Mask.causal())
    plans = Ring(tiling, grid, way.ring, way.back)
    shape = Shape(
        tokens=BYTES_TOKENS,
        query_heads=heads.query,
        kv_heads=heads.kv,
        head_dim=args.head_dim,
        value_head_dim=args.head_dim,
        element_bytes=2,
        gradient_bytes=2 if way.dtype is GradDtype.MODEL else 4,
    )
    nodes = nodes_of(grid.ranks, _nodes_of_bytes(args))
    sent = traffic([*plans.reads(), *plans.gradients()], shape.item_bytes(), nodes)
    return {"card": sent.nic, "node": sent.node, "rank": sent.rank}


def _nodes_of_bytes(args: argparse.Namespace) -> int:
    return min(n for n in args.nodes if n > 1)


ABOUT = """
Relative error (Frobenius norm) of causal attention against dense attention in float64; in brackets
the ratio to one call of the same kernel on the whole sequence. The columns are numbers of ranks on
a flat ring, or nodes x ranks on a double ring. {tokens} tokens, head size {head_dim}, kernel
{kernel}, mean of {seeds} seeds, inputs normal with variance 1, zigzag. "dtype, return": the dtype
of gradients while they travel (sums are float32) and how they come home; what stays does not depend
on it. The ranks are simulated in one process.
"""
ABOUT_BYTES = """
MiB that leave in one backward, blocks and gradients, of {ranks} ranks on {nodes} nodes at
{tokens} tokens a rank, counted from the plans: through the busiest rank's own network card /
out of the busiest node / from the busiest rank, to its own node and others.
"""


def page(args: argparse.Namespace) -> Page:
    here, rows = origin(args.device), error_rows(args)
    body = error_table(rows)
    if max(args.nodes) > 1:
        nodes, sent = _nodes_of_bytes(args), bytes_rows(args)
        about = ABOUT_BYTES.format(ranks=max(args.ranks), nodes=nodes, tokens=BYTES_TOKENS)
        body, rows = f"{body}\n{about}\n{bytes_table(args, sent)}", [*rows, *sent]
    return Page(args.title, ABOUT.format(**vars(args)), body, rows, here)


def flags(arguments: list[str]) -> argparse.Namespace:
    made = parser(__doc__, "accuracy")
    add = made.add_argument
    add("--tokens", type=int, default=1024)
    add("--heads", type=_heads, nargs="+", default=[Heads(8, 8), Heads(8, 2), Heads(8, 1)])
    add("--head-dim", type=int, default=64)
    add("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    text = "1: flat; more: a double ring of the most"
    add("--nodes", type=int, nargs="+", default=[1], help=text)
    add("--ring", type=Kind, nargs="+", choices=[*TRAVELLING], default=[Kind.KV])
    returns = [GradientReturn.CHAIN, GradientReturn.HOME]
    add(
        "--return",
        type=GradientReturn,
        nargs="+",
        choices=returns,
        default=returns[:1],
        dest="back",
    )
    dtypes = [*GradDtype]
    add("--grad-dtype", type=GradDtype, nargs="+", choices=dtypes, default=dtypes[:1], dest="dtype")
    add("--seeds", type=int, default=3, help="inputs to average over")
    add("--kernel", default="auto", help="as --burst-kernel")
    add("--device", default="cpu")
    args = parse(made, arguments)
    if any(max(args.ranks) % nodes for nodes in args.nodes):
        made.error(f"--nodes {args.nodes} must divide the most --ranks, {max(args.ranks)}")
    args.name, args.title = "accuracy", "Error of bfloat16 attention against the number of ranks"
    if len(args.back) > 1:
        args.name = "gradient_return"
        args.title = "Error and bytes of gradients that return by a chain or straight home"
    return args


def _heads(text: str) -> Heads:
    query, kv = map(int, text.split(":"))
    return Heads(query, kv)


def main() -> None:
    args = flags(sys.argv[1:])
    torch.set_num_threads(1)  # the ranks are threads already
    try:
        page(args).publish(output(args, args.name))
    except ValueError as error:
        sys.exit(f"accuracy: {error}")


if __name__ == "__main__":
    main()
