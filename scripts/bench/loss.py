#!/usr/bin/env python
"""Times the chunked LM head loss and counts its memory, against all logits at once.

    python scripts/bench/loss.py
    PYTHONPATH=. python scripts/bench/loss.py --device cuda

Forward and backward of the mean loss, in turns. On the CPU it is CPU time, on a GPU the time
between CUDA events; there Liger's and Apple's packages (liger-kernel, cut-cross-entropy) take part
where they are installed. Memory is what lives beside inputs, weight and gradients: counted on
tensors without data at sizes of real models, and on a GPU also the allocator's peak. Prints
Markdown tables and writes them, with the date, the device, the load, the versions and the command,
to scripts/bench/results/, and the figure to the file of --figure.
"""

import argparse
import datetime
import importlib
import os
import platform
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from torch import Tensor

from megatron_burst import linear_cross_entropy
from megatron_burst.linear_cross_entropy import products
from megatron_burst.linear_cross_entropy.chunk_size import MIB

HERE = Path(__file__).resolve().parent
ALL_LOGITS = "all logits"
TARGETS = {"in backward": 1.4, "in forward": 1.05}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"shapes": ["2048x16384x1024", "4096x32768x256"], "dtype": "float32"},
    "cuda": {"shapes": ["8192x32768x4096", "8192x131072x4096"], "dtype": "bfloat16"},
}

type Way = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, weight, targets -> mean loss


class Shape(NamedTuple):
    tokens: int
    vocabulary: int
    hidden: int

    def __str__(self) -> str:
        return "{} x {} x {}".format(*self)


class Measured(NamedTuple):
    milliseconds: float  # median
    fastest: float
    peak: int  # bytes beside inputs, weight and gradients; 0 where it was not measured


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def chunked(**arguments: Any) -> Way:
    return lambda *tensors: linear_cross_entropy(*tensors, **arguments).mean()


def ways(args: argparse.Namespace) -> dict[str, Way]:
    """Return what is compared, by name."""
    found: dict[str, Way] = {
        ALL_LOGITS: all_logits,
        "in backward": chunked(memory_mb=args.memory_mb, gradients="backward"),
        "in forward": chunked(memory_mb=args.memory_mb, gradients="forward"),
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
    """Return the milliseconds of one forward and backward, and on a GPU the peak in bytes."""
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    if device == "cpu":
        start = time.process_time()
        way(hidden, weight, targets).backward()
        return 1e3 * (time.process_time() - start), 0
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
    return started.elapsed_time(ended), peak


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Measured]:
    """Return the times of all ways, repetitions in turns, and their peaks."""
    inputs = make_inputs(shape, args.device, args.dtype)
    times: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, int] = {}
    named = list(ways(args).items())
    for repetition in range(1 + args.repetitions):
        shift = repetition % len(named)
        for name, way in named[shift:] + named[:shift]:
            milliseconds, peaks[name] = once(way, inputs, args.device)
            if repetition:  # the first one warms up
                times[name].append(milliseconds)
    return {name: Measured(median(t), min(t), peaks[name]) for name, t in times.items()}


def time_table(args: argparse.Namespace) -> str:
    """Return the times in Markdown, with the ratio to all logits at once."""
    lines = [
        "| tokens x vocabulary x hidden | way | median ms | ratio | at most | of fastest | MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for shape in args.shapes:
        found = measure(args, shape)
        base = found[ALL_LOGITS]
        for name in ways(args):
            one = found[name]
            cells = [
                *(str(shape), name, f"{one.milliseconds:.0f}"),
                f"{one.milliseconds / base.milliseconds:.3f}",
                f"{TARGETS[name]}" if name in TARGETS else "",
                f"{one.fastest / base.fastest:.3f}",
                f"{one.peak / MIB:.0f}" if one.peak else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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


def memory(args: argparse.Namespace) -> dict[tuple[str, int], list[int]]:
    """Return the peaks for each way and vocabulary, by number of tokens."""
    compared = {
        ALL_LOGITS: all_logits,
        f"chunked, {args.memory_mb} MiB": chunked(memory_mb=args.memory_mb, gradients="backward"),
    }
    return {
        (name, rows): [
            counted_peak(way, Shape(tokens, rows, args.hidden), torch.bfloat16)
            for tokens in args.tokens
        ]
        for rows in args.vocabularies
        for name, way in compared.items()
    }


def memory_table(args: argparse.Namespace, peaks: Mapping[tuple[str, int], list[int]]) -> str:
    lines = [
        f"| vocabulary | way | {' | '.join(f'{tokens} tokens' for tokens in args.tokens)} |",
        "|---|---|" + "---:|" * len(args.tokens),
    ]
    for (name, rows), row in peaks.items():
        cells = [str(rows), name, *(f"{peak / MIB:.0f}" for peak in row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(args: argparse.Namespace, peaks: Mapping[tuple[str, int], list[int]]) -> None:
    """Write the figure of memory against tokens."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "megatron_burst"}
    with rc_context(style):
        figure = Figure(figsize=(8, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for (name, rows), row in peaks.items():
            fused = name != ALL_LOGITS
            axes.plot(
                args.tokens,
                [peak / MIB for peak in row],
                label=f"{name}, vocabulary {rows // 1024}k",
                color=f"C{list(args.vocabularies).index(rows)}",
                linestyle="-" if fused else "--",
                marker="o" if fused else "x",
                linewidth=2.4 if fused else 1.4,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(args.tokens, [f"{tokens // 1024}k" for tokens in args.tokens])
        axes.set_yticks(ticks := [2**n for n in range(8, 20, 2)], [_mib(tick) for tick in ticks])
        axes.set_xlabel("tokens on a rank")
        axes.set_ylabel("memory of the LM head and loss")
        axes.set_title(f"Beside inputs, weight and gradients; bfloat16, hidden size {args.hidden}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(args.figure, metadata={"Date": None} if args.figure.suffix == ".svg" else {})


def _mib(number: int) -> str:
    return f"{number} MiB" if number < 1024 else f"{number // 1024} GiB"


def page(args: argparse.Namespace) -> str:
    """Return the tables with all that is needed to measure them again."""
    load = f"{os.getloadavg()[0]:.1f}"
    if args.device == "cpu":
        device = f"CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        device += f"; {torch.get_num_threads()} thread(s); load of the machine at the start {load}"
    else:
        device = torch.cuda.get_device_name(args.device)
    command = shlex.join(["python", "scripts/bench/loss.py", *sys.argv[1:]])
    peaks = memory(args)
    if args.figure is not None:
        draw(args, peaks)
    return f"""# The chunked LM head loss: time and memory

Forward and backward of the mean loss, {str(args.dtype).removeprefix("torch.")}, median of
{args.repetitions} repetitions in turns. "all logits": `F.cross_entropy(F.linear(hidden, weight)
.float(), targets)`. "in backward", "in forward": `linear_cross_entropy` with
`memory_mb={args.memory_mb}` and its gradients made there.
{_clock(args)}

* date: {datetime.date.today()}
* device: {device}
* versions: torch {torch.__version__}, Python {platform.python_version()}
* command: `{command}`

{time_table(args)}

Memory in MiB beside inputs, weight and gradients at the largest moment of forward and backward,
bfloat16, hidden size {args.hidden}: live bytes counted operation by operation, on tensors without
data. For all logits it is too little by the gradients, which do not exist yet at that moment.
Gradients are made in backward. Where dW in float32 takes more than half of the limit it is summed
in blocks of rows, for which the logits are computed once more; with Megatron's `main_grad` there is
no such sum.

{memory_table(args, peaks)}
"""


def _clock(args: argparse.Namespace) -> str:
    if args.device == "cpu":
        return "CPU time of the process: other load does not count, but shares the caches."
    return (
        "Time between CUDA events. MiB: the allocator's peak beside inputs, weight and gradients."
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=about[0], epilog=about[2])
    parser.add_argument("--device", default="cpu", choices=[*DEFAULTS])
    parser.add_argument(
        "--shapes", type=_shape, nargs="+", metavar="TOKENSxVOCABULARYxHIDDEN", help="to time"
    )
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name))
    parser.add_argument("--memory-mb", type=int, default=512, help="as --lm-head-memory-mb")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--hidden", type=int, default=4096, help="of the tables of memory")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32768, 131072, 262144])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--figure", type=Path, help="an .svg or .png to draw the memory to")
    parser.add_argument("--output", type=Path, help="default: DATE_DEVICE_loss.md in results/")
    parser.set_defaults(**DEFAULTS["cpu"])
    device = parser.parse_known_args(arguments)[0].device
    defaults = DEFAULTS[device]
    parser.set_defaults(
        shapes=[_shape(text) for text in defaults["shapes"]],
        dtype=getattr(torch, defaults["dtype"]),
    )
    args = parser.parse_args(arguments)
    if min(args.memory_mb, args.repetitions, args.threads, args.hidden, *args.tokens) < 1:
        parser.error("all numbers must be positive")
    name = f"{datetime.date.today()}_{args.device}_loss.md"
    args.output = args.output or HERE / "results" / name
    return args


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split("x")))


def main() -> None:
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    try:
        text = page(args)
    except ValueError as error:
        sys.exit(f"loss: {error}")
    print(text)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
