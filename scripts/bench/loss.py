#!/usr/bin/env python
"""Times the chunked LM head loss and counts its memory, against all logits at once.

    python scripts/bench/loss.py
    PYTHONPATH=. python scripts/bench/loss.py --device cuda

Forward and backward of the mean loss, in turns. On the CPU it is CPU time, on a GPU the time
between CUDA events; there Liger's and Apple's packages (liger-kernel, cut-cross-entropy) take part
where they are installed. Memory is what lives beside inputs, weight and gradients: counted on
tensors without data at sizes of real models, and on a GPU also the allocator's peak. Writes a page
and its CSV.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from page import Page, Row, origin, output, parse, parser, table
from torch import Tensor
from turns import in_turns, spread

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import products
from megatron_burst.loss.chunk_size import MIB

ALL_LOGITS = "all logits"
CHUNKED = "in chunks"
TARGETS = {CHUNKED: 1.4}
type Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets -> mean loss


class Shape(NamedTuple):
    tokens: int
    vocabulary: int
    hidden: int

    def __str__(self) -> str:
        return "{} x {} x {}".format(*self)


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "shapes": [Shape(2048, 16384, 1024), Shape(4096, 32768, 256)],
        "dtype": torch.float32,
    },
    "cuda": {
        "shapes": [Shape(8192, 32768, 4096), Shape(8192, 131072, 4096)],
        "dtype": torch.bfloat16,
    },
}


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def chunked(**arguments: Any) -> Way:
    return lambda *tensors: linear_cross_entropy(*tensors, **arguments).mean()


def ways(args: argparse.Namespace) -> dict[str, Way]:
    """Return what is compared, by name."""
    found: dict[str, Way] = {
        ALL_LOGITS: all_logits,
        CHUNKED: chunked(memory_mb=args.memory_mb),
    }
    if args.device != "cpu":
        found |= packages()
    return found


def packages() -> dict[str, Way]:
    """Return the other fused losses that are installed."""
    found: dict[str, Way] = {}
    for name, module, make in (
        ("Liger", "liger_kernel.transformers", _liger),
        ("Apple's CCE", "cut_cross_entropy", _apple),
    ):
        try:
            found[name] = make(importlib.import_module(module))
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    return found


def _liger(module: Any) -> Way:
    loss = module.LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, targets: loss(weight, hidden, targets)


def _apple(module: Any) -> Way:
    return lambda *tensors: module.linear_cross_entropy(*tensors)


def make_inputs(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states and a weight whose logits have a standard deviation of 2, and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(shape.tokens, shape.hidden, device=device)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device) * 2 / shape.hidden**0.5
    targets = torch.randint(0, shape.vocabulary, (shape.tokens,), device=device)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def once(way: Way, inputs: tuple[Tensor, Tensor, Tensor], device: str) -> tuple[float, int]:
    """Return the seconds of one forward and backward, and on a GPU the peak in bytes.

    The peak is that beside inputs, weight and gradients; 0 where it was not measured.
    """
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    if device == "cpu":
        start = time.process_time()
        way(hidden, weight, targets).backward()
        return time.process_time() - start, 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    way(hidden, weight, targets).backward()
    ended.record()
    torch.cuda.synchronize()
    gradients = sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)
    peak = torch.cuda.max_memory_allocated() - before - gradients
    return started.elapsed_time(ended) / 1e3, peak


def time_rows(args: argparse.Namespace) -> list[Row]:
    """Measure all ways at all shapes."""
    found: list[Row] = []
    for shape in args.shapes:
        inputs = make_inputs(shape, args.device, args.dtype)
        calls = {name: partial(once, way, inputs, args.device) for name, way in ways(args).items()}
        times = in_turns(calls, args.repetitions)
        spreads = {name: spread([seconds for seconds, _ in t]) for name, t in times.items()}
        for name, one in spreads.items():
            row = {"benchmark": "loss", "measured": "time", **shape._asdict(), "way": name, **one}
            for column in ("median_s", "least_s"):
                row[f"ratio_of_{column[:-2]}"] = one[column] / spreads[ALL_LOGITS][column]
            found.append({**row, "repetitions": args.repetitions, "bytes": times[name][-1][1]})
    return found


def time_table(found: Sequence[Row]) -> str:
    """Return the times in Markdown, with the ratio to all logits at once."""
    head = "tokens x vocabulary x hidden, way, median ms, ratio, at most, of fastest, MiB"
    lines = [
        [
            *(str(Shape(*(row[name] for name in Shape._fields))), row["way"]),
            f"{1e3 * row['median_s']:.0f}",
            f"{row['ratio_of_median']:.3f}",
            f"{TARGETS.get(row['way'], '')}",
            f"{row['ratio_of_least']:.3f}",
            f"{row['bytes'] / MIB:.0f}" if row["bytes"] else "",
        ]
        for row in found
    ]
    return table(head.split(", "), lines, numbers=2)


def counted_peak(way: Way, shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes at the largest moment, less inputs, weight and gradients.

    At the largest moment of all logits there are no gradients yet, so they take more than this.
    """
    inputs = make_inputs(shape, "meta", dtype)
    # What asks the device how it multiplies gets the answer of an older GPU.
    older = mock.patch.object(products, "best_way", lambda *_: products.rounded_parts)
    with older, LiveBytes(inputs) as live:
        way(*inputs).backward()
    return live.peak - (shape.tokens + shape.vocabulary) * shape.hidden * dtype.itemsize


def memory_rows(args: argparse.Namespace) -> list[Row]:
    """Count the peaks of both ways for all vocabularies and numbers of tokens."""
    compared = {
        ALL_LOGITS: all_logits,
        f"chunked, {args.memory_mb} MiB": chunked(memory_mb=args.memory_mb),
    }
    shapes = [Shape(n, rows, args.hidden) for rows in args.vocabularies for n in args.tokens]
    return [
        {
            "benchmark": "loss",
            "measured": "memory",
            **shape._asdict(),
            "way": name,
            "bytes": counted_peak(way, shape, torch.bfloat16),
        }
        for shape in shapes
        for name, way in compared.items()
    ]


def memory_table(found: Sequence[Row]) -> str:
    lines: dict[tuple[int, str], list[str]] = {}
    for row in found:
        line = lines.setdefault((row["vocabulary"], row["way"]), [])
        line.append(f"{row['bytes'] / MIB:.0f}")
    tokens = [f"{n} tokens" for n in dict.fromkeys(row["tokens"] for row in found)]
    cells = ([str(rows), way, *line] for (rows, way), line in lines.items())
    return table(["vocabulary", "way", *tokens], cells, numbers=2)


ABOUT = """
Forward and backward of the mean loss, {dtype}, median of {repetitions} repetitions in turns. "all
logits": `F.cross_entropy(F.linear(hidden, weight).float(), targets)`. "in chunks":
`linear_cross_entropy` with `memory_mb={memory_mb}`. {clock}
"""
CLOCKS = {
    "cpu": "CPU time of the process: other load does not count, but shares the caches.",
    "cuda": "Time between CUDA events. MiB: the allocator's peak beside what is counted below.",
}
ABOUT_MEMORY = """
Memory in MiB beside inputs, weight and gradients at the largest moment of forward and backward,
bfloat16, hidden size {hidden}: live bytes counted operation by operation, on tensors without
data. For all logits it is too little by the gradients, which do not exist yet at that moment.
Where dW in float32 takes more than half of the limit it is summed
in blocks of rows, for which the logits are computed once more; with Megatron's `main_grad` there is
no such sum.
"""


def page(args: argparse.Namespace) -> Page:
    here, times, peaks = origin(args.device), time_rows(args), memory_rows(args)
    dtype = str(args.dtype).removeprefix("torch.")
    about = ABOUT.format(**{**vars(args), "dtype": dtype, "clock": CLOCKS[args.device]})
    parts = [time_table(times), ABOUT_MEMORY.format(**vars(args)).strip(), memory_table(peaks)]
    title = "The chunked LM head loss: time and memory"
    return Page(title, about, "\n\n".join(parts), [*times, *peaks], here)


def flags(arguments: list[str]) -> argparse.Namespace:
    made = parser(__doc__, "loss")
    add = made.add_argument
    add("--device", default="cpu", choices=[*DEFAULTS])
    add("--shapes", type=_shape, nargs="+", metavar="TOKENSxVOCABULARYxHIDDEN", help="to time")
    add("--dtype", type=lambda name: getattr(torch, name))
    add("--memory-mb", type=int, default=512, help="as --lm-head-memory-mb")
    add("--repetitions", type=int, default=5)
    add("--threads", type=int, default=1, help="of the CPU")
    add("--hidden", type=int, default=4096, help="of the tables of memory")
    add("--vocabularies", type=int, nargs="+", default=[32768, 131072, 262144])
    add("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    return parse(made, arguments, DEFAULTS)


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


def main() -> None:
    args = flags(sys.argv[1:])
    torch.set_num_threads(args.threads)
    try:
        page(args).publish(output(args, "loss"))
    except ValueError as error:
        sys.exit(f"loss: {error}")


if __name__ == "__main__":
    main()
