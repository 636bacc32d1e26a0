#!/usr/bin/env python
"""Measures step time and stored bytes of checkpointed layers that keep attention's results.

    python scripts/bench/recompute.py [--tokens 16384] [--layers 2]

A few layers in which attention dominates, forward and backward, on one rank: without recompute, and
with every layer checkpointed for each ρ, in turns. Times are CPU time of the process, so that other
load counts little. Stored are the bytes that operations have made in forward and that live until
backward. Beside both stand the predictions: the time without recompute, and that of one more
forward less the share of attention that does not run again; bytes as counted by hand. Writes a page
and its CSV.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from live_bytes import LiveBytes
from page import Page, Row, origin, output, parse, parser, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from turns import in_turns, spread

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.plans.cost import visible_pairs
from megatron_burst.plans.recompute import boundary
from megatron_burst.plugin.attention.recompute import Checkpoints

MIB = 2**20
FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
WITHIN = 0.2  # of the measured time


class Layer(nn.Module):
    """A transformer layer, its attention ours."""

    def __init__(self, args: argparse.Namespace, context: BurstContext) -> None:
        super().__init__()
        self.context, self.heads = context, args.heads
        self.checkpoints: Checkpoints | None = None
        self.norms = nn.ModuleList(nn.LayerNorm(args.hidden) for _ in range(2))
        self.qkv = nn.Linear(args.hidden, 3 * args.hidden)
        self.out = nn.Linear(args.hidden, args.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(args.hidden, 4 * args.hidden),
            nn.GELU(),
            nn.Linear(4 * args.hidden, args.hidden),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        if self.checkpoints is not None:
            self.checkpoints.enter_layer(hidden)
        hidden = hidden + self.out(self.attend(*self.split(hidden)).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))

    def split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norms[0](hidden)).unflatten(2, (self.heads, -1)).chunk(3, dim=3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory = self.checkpoints and self.checkpoints.memory(self, q)
        return ring_attention(q, k, v, self.context, mask=Mask.causal(), memory=memory or None)


class Point(NamedTuple):
    seconds: float
    stored: float  # bytes


class Bench:
    """The layers, and what is done with them.

    A step's input is a tensor of its own, as a model's embedding makes it.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.args = args
        self.context = BurstContext.create(BurstConfig())
        self.layers = [Layer(args, self.context) for _ in range(args.layers)]
        self.x = torch.randn(1, args.tokens, args.hidden)

    def forward(self, fraction: float | None) -> Tensor:
        """Run forward; None is without recompute, 1 recompute as it is without ours."""
        checkpoints = None
        if fraction is not None and fraction < 1:
            checkpoints = Checkpoints(fraction, offload=False)
        hidden = self.x.clone().requires_grad_()
        for layer in self.layers:
            layer.checkpoints = checkpoints
            if fraction is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=True)
        return hidden.square().mean()

    def step(self, fraction: float | None) -> None:
        self.forward(fraction).backward()
        for layer in self.layers:
            layer.zero_grad()

    def attention(self) -> None:
        """Run the forward of attention alone, once a layer."""
        with torch.no_grad():
            for layer in self.layers:
                layer.checkpoints = None
                layer.attend(*self.qkv)

    def whole_forward(self) -> None:
        with torch.no_grad():
            self.forward(None)

    @property
    def qkv(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.layers[0].split(self.x)

    def stored(self, fraction: float | None) -> int:
        """Return the bytes that forward leaves behind for backward."""
        existing = [self.x, *(p for layer in self.layers for p in layer.parameters())]
        with LiveBytes(existing) as live:
            loss = self.forward(fraction)
            stored = live.now
        del loss
        return stored

    def prediction(self, fraction: float) -> tuple[float, int]:
        """Return the share of attention's FLOPs that runs again, and the bytes a layer keeps."""
        args, mask = self.args, Mask.causal()
        stop = boundary(self.context.layout(args.tokens), fraction)
        again = visible_pairs(replace(mask, query_stop=stop), args.tokens)
        row = 4 * (args.hidden + args.heads)  # an output and a log-sum-exp a head, in float32
        return again / visible_pairs(mask, args.tokens), (args.tokens - stop) * row


def cpu_time(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(bench: Bench) -> tuple[dict[float | None, Point], dict[float, Point], list[Row]]:
    """Return, for each ρ, what was measured, what was predicted, and the rows of the CSV.

    None is no recompute.
    """
    args = bench.args
    ways: dict[object, Callable[[], float]] = {
        fraction: partial(cpu_time, partial(bench.step, fraction))
        for fraction in (None, *FRACTIONS)
    }
    ways["attention"] = partial(cpu_time, bench.attention)
    ways["forward"] = partial(cpu_time, bench.whole_forward)
    spreads = {name: spread(times) for name, times in in_turns(ways, args.repetitions).items()}
    middle = {name: found["median_s"] for name, found in spreads.items()}
    measured = {f: Point(middle[f], bench.stored(f)) for f in (None, *FRACTIONS)}
    hidden = (args.layers + 1) * bench.x.nbytes  # the inputs of the layers and the last output
    predicted = {}
    for fraction in FRACTIONS:
        flops_share, kept = bench.prediction(fraction)
        spared = (1 - flops_share) * middle["attention"]
        seconds = middle[None] + middle["forward"] - spared
        predicted[fraction] = Point(seconds, hidden + args.layers * kept)
    sizes = {n: getattr(args, n) for n in ("layers", "tokens", "hidden", "heads", "repetitions")}
    rows: list[Row] = []
    for which, point in measured.items():
        row = {"benchmark": "recompute", **sizes, "fraction": "none", **spreads[which]}
        row["stored_bytes"] = point.stored
        if which is not None:
            row["fraction"] = which
            row["predicted_s"], row["predicted_bytes"] = predicted[which]
        rows.append(row)
    return measured, predicted, rows


def results(measured: dict[float | None, Point], predicted: dict[float, Point]) -> str:
    """Return the table."""
    lines = []
    for fraction, one in measured.items():
        cells = ["none" if fraction is None else f"ρ = {fraction:g}", f"{one.seconds:.2f}"]
        if fraction is None:
            cells += ["", "", f"{one.stored / MIB:.1f}", "", ""]
        else:
            other = predicted[fraction]
            cells += [f"{other.seconds:.2f}", f"{other.seconds / one.seconds - 1:+.1%}"]
            cells += [f"{one.stored / MIB:.1f}", f"{other.stored / MIB:.1f}"]
            cells += [f"{other.stored / one.stored - 1:+z.1%}"]
        lines.append(cells)
    head = "recompute, s a step, predicted, apart, MiB stored, predicted, apart"
    return table(head.split(", "), lines, numbers=1)


ABOUT = """
{layers} layers, {tokens} tokens on one rank, hidden size {hidden}, {heads} heads, float32, causal:
forward and backward. ρ is `--recompute-attention-fraction`, the share of the sequence whose
attention runs again; ρ = 1 is recompute without it. CPU time of the process, median of
{repetitions} repetitions in turns. Predicted time: that without recompute and one more forward,
less the share of attention's forward that does not run again. Predicted bytes: the inputs of the
layers, the output of the last and what the policy keeps.
"""


def page(args: argparse.Namespace) -> Page:
    here = origin()
    measured, predicted, rows = measure(Bench(args))
    worst = max(abs(predicted[f].seconds / measured[f].seconds - 1) for f in FRACTIONS)
    verdict = "met" if worst <= WITHIN else "missed"
    body = f"""{results(measured, predicted)}

Predicted times within {WITHIN:.0%}: {verdict}, the furthest {worst:.1%} apart."""
    title = "Keeping attention's results: time against memory"
    return Page(title, ABOUT.format(**vars(args)), body, rows, here)


def flags(arguments: list[str]) -> argparse.Namespace:
    made = parser(__doc__, "recompute")
    sizes = {"layers": 3, "tokens": 8192, "hidden": 128, "heads": 2}
    for name, number in {**sizes, "repetitions": 5, "threads": 1}.items():
        made.add_argument(f"--{name}", type=int, default=number)
    args = parse(made, arguments)
    if args.hidden % args.heads:
        made.error(f"--hidden {args.hidden} does not divide by --heads {args.heads}")
    return args


def main() -> None:
    args = flags(sys.argv[1:])
    torch.set_num_threads(args.threads)
    page(args).publish(output(args, "recompute"))


if __name__ == "__main__":
    main()
