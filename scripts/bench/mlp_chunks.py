#!/usr/bin/env python
"""Measures the time of MLPs in chunks of tokens against MLPs as a whole, under full recompute.

    python scripts/bench/mlp_chunks.py [--tokens 16384] [--chunks 8]

Layers that are an MLP each, gated and 3.5 times as wide as the hidden states, behind a norm and
beside the residual; forward and backward on one rank. Where every checkpoint holds one layer, the
replay leaves out an output that nothing reads, so an MLP runs forward twice, as it does whole.
Where one holds two layers it runs three times. Times are CPU time of the process.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from harness import Flags, Row, in_turns, origin, publish, seconds, spread, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_burst.plugin.hooks.mlp import ChunkedMlp

LAYERS = 2
ONE, PAIRS = "one layer", "two layers"
ALLOWED = {ONE: 1.05, PAIRS: 4 / 3}


class Mlp(nn.Module):
    """Megatron's, as far as a chunk sees it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        width = 7 * hidden // 2
        self.config = SimpleNamespace(
            ffn_hidden_size=width, gated_linear_unit=True, sequence_parallel=True
        )
        self.first = nn.Linear(hidden, 2 * width, bias=False)
        self.second = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, linear = self.first(hidden).chunk(2, -1)
        out: Tensor = self.second(F.silu(gate) * linear)
        return out


class Bench:
    """The layers; checkpoints hold one or all of them."""

    def __init__(self, args: argparse.Namespace, held: str, chunks: int | None) -> None:
        torch.manual_seed(0)
        self.held = held
        self.norm = nn.LayerNorm(args.hidden)
        self.mlps = nn.ModuleList(Mlp(args.hidden) for _ in range(LAYERS))
        if chunks:
            for mlp in self.mlps:
                ChunkedMlp(mlp, held == PAIRS, chunks)  # type: ignore[arg-type]
        self.x = torch.randn(args.tokens, 1, args.hidden)

    def step(self) -> None:
        hidden = self.x.clone().requires_grad_()
        if self.held == PAIRS:
            hidden = checkpoint(self._run, hidden, *self.mlps, use_reentrant=True)
        else:
            for mlp in self.mlps:
                hidden = checkpoint(self._run, hidden, mlp, use_reentrant=True)
        hidden.square().mean().backward()
        self.mlps.zero_grad()

    def _run(self, hidden: Tensor, *mlps: Mlp) -> Tensor:
        for mlp in mlps:
            hidden = hidden + mlp(self.norm(hidden))
        return hidden


def measure(args: argparse.Namespace) -> list[Row]:
    cases = [(held, chunks) for held in ALLOWED for chunks in (0, args.chunks)]
    ways = {case: partial(seconds, Bench(args, *case).step) for case in cases}
    times = in_turns(ways, args.repetitions)
    sizes = {name: getattr(args, name) for name in ("tokens", "hidden", "repetitions")}
    return [
        {**sizes, "held": held, "chunks": chunks, **spread(times[held, chunks])}
        for held, chunks in cases
    ]


PAGE = """
# MLPs in chunks: time

{tokens} tokens on one rank, hidden size {hidden}, two layers that are a gated MLP each, 3.5 times
as wide, float32, full recompute: forward and backward. CPU time of the process, median of
{repetitions} repetitions in turns.

{body}

Whole, an MLP runs forward twice and backward once, which takes the time of two forwards. In chunks
it does so where a checkpoint holds one layer (at most {one:.2f} is wanted), and runs forward once
more where it holds two (at most {pairs:.2f}): {verdict}.
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = Flags(__doc__)
    for name, number in {"tokens": 8192, "hidden": 256, "chunks": 4}.items():
        made.add_argument(f"--{name}", type=int, default=number)
    return made.read(given)


def main() -> None:
    args = flags()
    here, rows = origin(), measure(args)
    lines, kept = [], True
    for whole, cut in zip(rows[::2], rows[1::2], strict=True):
        ratio = cut["median_s"] / whole["median_s"]
        kept &= ratio <= ALLOWED[whole["held"]]
        times = (f"{row['median_s']:.3f}" for row in (whole, cut))
        lines.append([f"{whole['held']}", *times, f"{ratio:.3f}"])
    head = ["a checkpoint holds", "s whole", f"s in {args.chunks} chunks", "ratio"]
    verdict = "met" if kept else "NOT met"
    wanted = {"one": ALLOWED[ONE], "pairs": ALLOWED[PAIRS], "verdict": verdict}
    publish(args, "mlp_chunks", PAGE, rows, here, body=table(head, lines), **wanted)


if __name__ == "__main__":
    main()
