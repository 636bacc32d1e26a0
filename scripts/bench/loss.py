#!/usr/bin/env python
"""Times the chunked LM head loss, with logits made once and twice, and counts its memory.

Against all logits at once and gradients in the forward, as Liger makes them; on a GPU by Liger's
own function where liger-kernel is installed.

    python scripts/bench/loss.py
    PYTHONPATH=. python scripts/bench/loss.py --device cuda

Memory is what lives beside inputs, weight and gradients, counted on tensors without data at sizes
of real models.
"""

import argparse
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import harness
import torch
from harness import Row
from torch import Tensor

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import products
from megatron_burst.loss.chunk_size import Sizes, within
from megatron_burst.tools.gpu_check.loss import all_logits, draw_inputs
from megatron_burst.tools.live_bytes import LiveBytes

ALL_LOGITS, ONCE, TWICE, LIGER = "all logits", "once", "twice", "Liger's algorithm"
MOST_LOGITS = 2**28  # of all tokens at once
type Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets -> mean loss


class Shape(NamedTuple):
    tokens: int
    vocabulary: int
    hidden: int


DEFAULTS: Mapping[str, Row] = {
    name: {
        "shapes": [
            Shape(1024 * thousands, vocabulary, hidden)
            for vocabulary, thousands in product((32768, 131072), (1, 4, 16, 64))
        ],
        "dtype": dtype,
    }
    for name, hidden, dtype in (("cpu", 64, "float32"), ("cuda", 4096, "bfloat16"))
}


class GradientsInForward(torch.autograd.Function):
    """Liger's algorithm in plain torch: 6·N·V·d FLOPs, gradients of the mean in the forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int
    ) -> Tensor:
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        mean, losses = 1.0 / len(hidden), []
        for at in range(0, len(hidden), chunk_size):
            states, wanted = hidden[at : at + chunk_size], targets[at : at + chunk_size, None]
            logits = (states @ weight.t()).float()
            highest, target = logits.amax(1, keepdim=True), logits.gather(1, wanted)
            total = logits.sub_(highest).exp_().sum(1, keepdim=True)
            losses.append(highest + total.log() - target)
            logits.mul_(mean / total).scatter_add_(1, wanted, torch.full_like(target, -mean))
            gradient = logits.to(weight.dtype)
            torch.mm(gradient, weight, out=d_hidden[at : at + chunk_size])
            products.add_product(d_weight, products.LogitsGradient(gradient, logits), states)
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        if grad != 1.0:
            d_hidden.mul_(grad)
            d_weight.mul_(grad)
        return d_hidden, d_weight, None, None


def ways(args: argparse.Namespace, shape: Shape) -> dict[str, Way]:
    """Return what is timed, by name; Liger's algorithm in chunks of as many tokens as ours."""
    dtype = getattr(torch, args.dtype)
    tokens = within(
        Sizes(**shape._asdict(), dtype=dtype, sums_apart=dtype.itemsize < 4), None
    ).tokens
    ways: dict[str, Way] = {
        LIGER: lambda *given: GradientsInForward.apply(*given, tokens),
        ONCE: partial(linear_cross_entropy, reduction="mean"),
        TWICE: lambda *given: linear_cross_entropy(*given).mean(),
    }
    if args.device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        ways["Liger"] = liger_fused_linear_cross_entropy
    if shape.tokens * shape.vocabulary <= MOST_LOGITS:
        ways[ALL_LOGITS] = all_logits
    return ways


def time_rows(args: argparse.Namespace) -> list[Row]:
    """Measure all ways at all shapes."""
    rows: list[Row] = []
    for shape in args.shapes:
        inputs = draw_inputs(args.device, getattr(torch, args.dtype), *shape)

        def once(way: Way, inputs: Sequence[Tensor] = inputs) -> float:
            inputs[0].grad = inputs[1].grad = None
            return harness.seconds(lambda: way(*inputs).backward(), args.device)

        calls = {name: partial(once, way) for name, way in ways(args, shape).items()}
        enough = min(5, MOST_LOGITS * 4 // (shape.tokens * shape.vocabulary))
        repetitions = max(args.repetitions, enough)
        turns = harness.in_turns(calls, repetitions)
        times = {name: harness.spread(taken) for name, taken in turns.items()}
        for name, one in times.items():
            row = {"measured": "time", **shape._asdict(), "way": name, **one}
            row["ratio_of_median"] = one["median_s"] / times[LIGER]["median_s"]
            rows.append({**row, "repetitions": repetitions})
    return rows


def counted_peak(way: Way, shape: Shape) -> int:
    """Return the bytes at the largest moment in bfloat16, less inputs, weight and gradients.

    At the largest moment of all logits there are no gradients yet, so they take more than this.
    """
    inputs = draw_inputs("meta", torch.bfloat16, *shape)
    # What asks the device how it multiplies gets the answer of an older GPU.
    older = mock.patch.object(products, "best_way", lambda *_: products.rounded_parts)
    with older, LiveBytes(inputs) as live:
        way(*inputs).backward()
    return live.peak - sum(x.nbytes for x in inputs[:2])


def memory_rows(args: argparse.Namespace) -> list[Row]:
    """Count the peaks of both ways for all vocabularies and numbers of tokens."""

    def chunked(*tensors: Tensor) -> Tensor:
        return linear_cross_entropy(*tensors, memory_mb=args.memory_mb).mean()

    every: dict[str, Way] = {ALL_LOGITS: all_logits, f"chunked, {args.memory_mb} MiB": chunked}
    return [
        {"measured": "memory", **shape._asdict(), "way": name, "bytes": counted_peak(way, shape)}
        for vocabulary, tokens in product(args.vocabularies, args.tokens)
        for shape in [Shape(tokens, vocabulary, args.hidden)]
        for name, way in every.items()
    ]


def memory_table(rows: Sequence[Row]) -> str:
    lines: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        line = lines.setdefault((row["vocabulary"], row["way"]), [])
        line.append(f"{row['bytes'] / harness.MIB:.0f}")
    tokens = [f"{n} tokens" for n in dict.fromkeys(row["tokens"] for row in rows)]
    cells = ([str(vocabulary), way, *line] for (vocabulary, way), line in lines.items())
    return harness.table(["vocabulary", "way", *tokens], cells, words=2)


def time_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            " x ".join(str(row[name]) for name in Shape._fields),
            *(row["way"], f"{1e3 * row['median_s']:.0f}", f"{row['ratio_of_median']:.3f}"),
        ]
        for row in rows
    ]
    return harness.table(
        ["tokens x vocabulary x hidden", "way", "median ms", "ratio"], lines, words=2
    )


PAGE = """
# The chunked LM head loss: time and memory

Forward and backward of the mean loss, {dtype}, median of at least {repetitions} in turns, CPU
time of the process, on a GPU the time between CUDA events; shapes of fewer than 2^30 logits have
more. Ratios are to "Liger's algorithm", stated in plain torch: gradients in the forward,
6·N·V·d FLOPs, in chunks of as many tokens as ours. "once": `linear_cross_entropy(...,
reduction="mean")`, whose forward makes the gradients. "twice": `linear_cross_entropy(...).mean()`,
logits again in the backward. "all logits":
`F.cross_entropy(F.linear(hidden, weight).float(), targets)`. torch 2.11 has none of its own.

{times}

Memory in MiB beside inputs, weight and gradients at the largest moment of forward and backward,
in bfloat16, with `memory_mb={memory_mb}`, hidden size {hidden}: live bytes counted operation by
operation, on tensors without data. For all logits it is too little by
the gradients, which do not exist yet at that moment.
Where dW in float32 takes more than half of the limit it is summed in blocks of rows, for which the
logits are computed once more; with Megatron's `main_grad` there is no such sum.

{memory}
"""


def flags(given: Sequence[str] | None = None) -> argparse.Namespace:
    made = harness.Flags(__doc__, DEFAULTS)
    add = made.add_argument
    add("--shapes", type=_shape, nargs="+", metavar="TOKENSxVOCABULARYxHIDDEN", help="to time")
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--memory-mb", type=int, default=512, help="as --lm-head-memory-mb")
    add("--hidden", type=int, default=4096, help="of the tables of memory")
    add("--vocabularies", type=int, nargs="+", default=[32768, 131072, 262144])
    add("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    return made.read(given)


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


def main() -> None:
    args = flags()
    here, times, peaks = harness.origin(args.device), time_rows(args), memory_rows(args)
    words = {"times": time_table(times), "memory": memory_table(peaks)}
    harness.publish(args, "loss", PAGE, [*times, *peaks], here, **words)


if __name__ == "__main__":
    main()
