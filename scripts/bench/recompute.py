#!/usr/bin/env python
"""Measures step time and stored bytes of checkpointed layers that keep attention's results.

    python scripts/bench/recompute.py [--tokens 16384] [--layers 2]
    PYTHONPATH=. python scripts/bench/recompute.py --device cuda

A few layers in which attention dominates, forward and backward, on one rank: without recompute, and
with every layer checkpointed for each ρ, on a GPU also with what is kept copied to the host. Times
are CPU time of the process, on a GPU between CUDA events. Stored are the bytes that operations have
made in forward and that live until backward; what a GPU has copied to its host is not.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from harness import MIB, Flags, Row, in_turns, origin, publish, seconds, spread, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from megatron_burst.plugin.attention.recompute import Checkpoints
from megatron_burst.tools.live_bytes import LiveBytes

FRACTIONS = (None, 0.0, 0.25, 0.5, 0.75, 1.0)  # None is without recompute, 1 without ours
OFFLOADED = (0.0, 0.5)  # of them, on a GPU also with what is kept on the host
DEFAULTS: Mapping[str, Row] = {
    "cpu": {"dtype": "float32", "layers": 3, "tokens": 8192, "hidden": 128, "heads": 2},
    "cuda": {"dtype": "bfloat16", "layers": 4, "tokens": 32768, "hidden": 4096, "heads": 32},
}
type Way = tuple[float | None, bool]  # ρ, and whether what is kept goes to the host


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
        layers = nn.ModuleList(Layer(args.hidden, args.heads) for _ in range(args.layers))
        self.layers = layers.to(args.device, getattr(torch, args.dtype))
        like = next(self.layers.parameters())
        self.x = like.new_empty(1, args.tokens, args.hidden).normal_()
        self.checkpoints = {
            (fraction, offload): Checkpoints(fraction, offload)
            for fraction, offload in ways(args.device)
            if fraction is not None and fraction < 1
        }

    def forward(self, way: Way) -> Tensor:
        hidden = self.x.clone().requires_grad_()
        for layer in self.layers:
            layer.checkpoints = self.checkpoints.get(way)
            if way[0] is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=True)
        return hidden.square().mean()

    def step(self, way: Way) -> None:
        self.forward(way).backward()
        self.layers.zero_grad()

    def stored(self, way: Way) -> int:
        """Return the bytes of the device that forward leaves behind for backward."""
        if self.x.is_cuda:
            before = torch.cuda.memory_allocated()
            loss = self.forward(way)
            stored = torch.cuda.memory_allocated() - before
            loss.backward()  # which ends what is under way
            self.layers.zero_grad()
            return stored
        with LiveBytes([self.x, *self.layers.parameters()]) as live:
            loss = self.forward(way)
            stored = live.now
        del loss
        return stored


def ways(device: str) -> list[Way]:
    offloaded = OFFLOADED if device == "cuda" else ()
    return [*((fraction, False) for fraction in FRACTIONS), *((f, True) for f in offloaded)]


def name_of(way: Way) -> str:
    fraction, offload = way
    return "none" if fraction is None else f"ρ = {fraction:g}{', offloaded' * offload}"


def measure(args: argparse.Namespace) -> list[Row]:
    bench = Bench(args)
    calls = {w: partial(seconds, partial(bench.step, w), args.device) for w in ways(args.device)}
    sizes = {n: getattr(args, n) for n in (*DEFAULTS["cpu"], "repetitions")}
    return [
        {**sizes, "recompute": name_of(way), **spread(times), "stored_bytes": bench.stored(way)}
        for way, times in in_turns(calls, args.repetitions).items()
    ]


PAGE = """
# Keeping attention's results: time against memory

{layers} layers, {tokens} tokens on one rank, hidden size {hidden}, {heads} heads, {dtype}, causal:
forward and backward. ρ is `--recompute-attention-fraction`, the share of the sequence whose
attention runs again; ρ = 1 is recompute without it. CPU time of the process, on a GPU between CUDA
events, median of {repetitions} repetitions in turns.

{body}
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = Flags(__doc__, DEFAULTS)
    made.add_argument("--dtype", choices=["float32", "bfloat16"])
    for name in ("layers", "tokens", "hidden", "heads"):
        made.add_argument(f"--{name}", type=int)
    return made.read(given)


def main() -> None:
    args = flags()
    here, rows = origin(args.device), measure(args)
    lines = (
        [row["recompute"], f"{row['median_s']:.2f}", f"{row['stored_bytes'] / MIB:.1f}"]
        for row in rows
    )
    body = table(["recompute", "s a step", "MiB stored"], lines)
    publish(args, "recompute", PAGE, rows, here, body=body)


if __name__ == "__main__":
    main()
