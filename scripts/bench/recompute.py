#!/usr/bin/env python
"""Measures step time and stored bytes of checkpointed layers that keep attention's results.

    python scripts/bench/recompute.py [--tokens 16384] [--layers 2]

A few layers in which attention dominates, forward and backward, on one rank: without recompute, and
with every layer checkpointed for each ρ. Times are CPU time of the process. Stored are the bytes
that operations have made in forward and that live until backward.
"""

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from harness import MIB, Flags, Row, in_turns, origin, publish, seconds, spread, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.plugin.attention.recompute import Checkpoints
from megatron_burst.tools.live_bytes import LiveBytes

FRACTIONS = (None, 0.0, 0.25, 0.5, 0.75, 1.0)  # None is without recompute, 1 without ours


class Layer(nn.Module):
    """A transformer layer, its attention ours."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.context, self.heads = BurstContext.create(BurstConfig()), heads
        self.checkpoints: Checkpoints | None = None
        self.qkv = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden))
        self.out = nn.Linear(hidden, hidden)
        widths = nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        self.mlp = nn.Sequential(nn.LayerNorm(hidden), *widths)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.checkpoints is not None:
            self.checkpoints.enter_layer(hidden)
        q, k, v = self.qkv(hidden).unflatten(2, (self.heads, -1)).chunk(3, dim=3)
        memory = self.checkpoints and self.checkpoints.memory(self, q)
        out = ring_attention(q, k, v, self.context, mask=Mask.causal(), memory=memory or None)
        hidden = hidden + self.out(out.flatten(2))
        return hidden + self.mlp(hidden)


class Bench:
    """The layers; a step's input is a tensor of its own, as a model's embedding makes it."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(args.hidden, args.heads) for _ in range(args.layers))
        self.x = torch.randn(1, args.tokens, args.hidden)

    def forward(self, fraction: float | None) -> Tensor:
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
        self.layers.zero_grad()

    def stored(self, fraction: float | None) -> int:
        """Return the bytes that forward leaves behind for backward."""
        with LiveBytes([self.x, *self.layers.parameters()]) as live:
            loss = self.forward(fraction)
            stored = live.now
        del loss
        return stored


def measure(args: argparse.Namespace) -> list[Row]:
    bench = Bench(args)
    ways = {f: partial(seconds, partial(bench.step, f)) for f in FRACTIONS}
    sizes = {n: getattr(args, n) for n in ("layers", "tokens", "hidden", "heads", "repetitions")}
    return [
        {
            **sizes,
            "fraction": "none" if fraction is None else fraction,
            **spread(times),
            "stored_bytes": bench.stored(fraction),
        }
        for fraction, times in in_turns(ways, args.repetitions).items()
    ]


PAGE = """
# Keeping attention's results: time against memory

{layers} layers, {tokens} tokens on one rank, hidden size {hidden}, {heads} heads, float32, causal:
forward and backward. ρ is `--recompute-attention-fraction`, the share of the sequence whose
attention runs again; ρ = 1 is recompute without it. CPU time of the process, median of
{repetitions} repetitions in turns.

{body}
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = Flags(__doc__)
    for name, number in {"layers": 3, "tokens": 8192, "hidden": 128, "heads": 2}.items():
        made.add_argument(f"--{name}", type=int, default=number)
    return made.read(given)


def main() -> None:
    args = flags()
    here, found = origin(), measure(args)
    names = ["none" if row["fraction"] == "none" else f"ρ = {row['fraction']:g}" for row in found]
    cells = [(f"{row['median_s']:.2f}", f"{row['stored_bytes'] / MIB:.1f}") for row in found]
    lines = ([name, *cell] for name, cell in zip(names, cells, strict=True))
    body = table(["recompute", "s a step", "MiB stored"], lines)
    publish(args, "recompute", PAGE, found, here, body=body)


if __name__ == "__main__":
    main()
