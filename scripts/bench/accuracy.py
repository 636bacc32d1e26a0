#!/usr/bin/env python
"""Measures how far attention in bfloat16 is from float64 as the number of ranks grows.

    python scripts/bench/accuracy.py [--tokens 1024] [--head-dim 64] [--ranks 1 2 4 8 16]

The ranks are threads of this process. They run the library's own plans, loops, kernels, merges and
sums; only the transport is another one: what a rank sends is handed over in memory. The yardstick
is the same kernel in one call on the whole sequence. Prints a Markdown table and writes it, with
the date, the device, the versions and the command, to scripts/bench/results/.
"""

import argparse
import datetime
import platform
import queue
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_burst import Mask
from megatron_burst.comm import Block, Communicator
from megatron_burst.context import AttentionCall
from megatron_burst.kernels import Kernel, Request, select_kernel
from megatron_burst.layout import Layout, zigzag
from megatron_burst.mask import Relation
from megatron_burst.plan import Item, Kind, Step, flat_kv_backward, flat_ring_forward
from megatron_burst.ring_attention.backward import backward
from megatron_burst.ring_attention.forward import forward

HEADS = {"MHA 8:8": (8, 8), "GQA 4:1 (8:2)": (8, 2), "GQA 8:1 (8:1)": (8, 1)}
RESULTS = ("out", "dq", "dk", "dv")
PATIENCE_SECONDS = 300
HERE = Path(__file__).resolve().parent

type Tensors = tuple[Tensor, ...]
type Channels = Mapping[tuple[int, int], queue.SimpleQueue[tuple[Item, Block]]]


class ThreadCommunicator(Communicator):
    """Hands tensors to the other ranks' threads instead of sending them."""

    def __init__(self, rank: int, channels: Channels) -> None:
        super().__init__(None, timeout_seconds=PATIENCE_SECONDS)
        self._rank, self._channels = rank, channels

    def post(
        self, step: Step, where: str, outgoing: Mapping[Item, Block], like: Mapping[Kind, Block]
    ) -> SimpleNamespace:
        for item, peer in step.sends:
            self._channels[self._rank, peer].put((item, outgoing[item]))
        return SimpleNamespace(wait=lambda: dict(self._take(t.item, t.peer) for t in step.receives))

    def _take(self, item: Item, peer: int) -> tuple[Item, Block]:
        arrived, block = self._channels[peer, self._rank].get(timeout=PATIENCE_SECONDS)
        if arrived != item:
            raise RuntimeError(f"rank {self._rank} expects {item} from {peer}, gets {arrived}")
        return arrived, block


def ring(inputs: Tensors, ranks: int, kernel: Kernel) -> Tensors:
    """Return (out, dq, dk, dv) of causal attention computed by `ranks` ranks."""
    layout = zigzag(inputs[0].shape[1], ranks)
    pairs = [(a, b) for a in range(ranks) for b in range(ranks)]
    channels = {pair: queue.SimpleQueue[tuple[Item, Block]]() for pair in pairs}
    with ThreadPoolExecutor(max_workers=ranks) as threads:
        shares = list(
            threads.map(lambda rank: one_rank(inputs, layout, rank, kernel, channels), range(ranks))
        )
    return tuple(layout.unshard([share[i] for share in shares], dim=1) for i in range(4))


def one_rank(
    inputs: Tensors, layout: Layout, rank: int, kernel: Kernel, channels: Channels
) -> Tensors:
    q, k, v, dout = (layout.shard(x, rank, dim=1) for x in inputs)
    call = AttentionCall(
        flat_ring_forward(layout, Mask.causal(), rank),
        flat_kv_backward(layout, Mask.causal(), rank),
        kernel,
        q.shape[-1] ** -0.5,
        ThreadCommunicator(rank, channels),
    )
    out, lse = forward(q, k, v, call)
    return out, *backward(dout, q, k, v, out, lse, call)


def whole(inputs: Tensors, kernel: Kernel) -> Tensors:
    """Return (out, dq, dk, dv) of one call of the kernel on the whole sequence."""
    q, k, v, dout = inputs
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, Relation.CAUSAL, scale)
    return out, *kernel.backward(dout, q, k, v, out, lse, Relation.CAUSAL, scale)


def oracle(inputs: Tensors) -> Tensors:
    """Return (out, dq, dk, dv) of dense attention in float64 by autograd."""
    q, k, v, dout = (x.double().requires_grad_() for x in inputs)
    k_all, v_all = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) * q.shape[-1] ** -0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", weights, v_all)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def errors(args: argparse.Namespace, heads: tuple[int, int]) -> dict[int, list[float]]:
    """Return the mean relative errors of RESULTS by number of ranks; 0 ranks is the yardstick."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0] * len(RESULTS))
    for seed in range(args.seeds):
        inputs = make_inputs(args, heads, seed)
        kernel = select_kernel(args.kernel, Request.of(*inputs[:3]))
        expected = oracle(inputs)
        runs: dict[int, Callable[[], Tensors]] = {0: lambda: whole(inputs, kernel)}  # noqa: B023
        for ranks in args.ranks:
            runs[ranks] = lambda ranks=ranks: ring(inputs, ranks, kernel)  # noqa: B023
        for ranks, run in runs.items():
            for index, (found, want) in enumerate(zip(run(), expected, strict=True)):
                error = (found.double() - want).norm() / want.norm()
                sums[ranks][index] += error.item() / args.seeds
    return sums


def make_inputs(args: argparse.Namespace, heads: tuple[int, int], seed: int) -> Tensors:
    """Draw q, k, v and dout, normal with variance 1, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, args.tokens, n, args.head_dim, generator=generator).to(
            args.device, torch.bfloat16
        )
        for n in (heads[0], heads[1], heads[1], heads[0])
    )


def table(measured: Mapping[str, Mapping[int, list[float]]]) -> str:
    """Return the errors in Markdown, each with its ratio to the yardstick's."""
    lines = [f"| heads | ranks | {' | '.join(RESULTS)} |", "|---|---:" + "|---" * 4 + "|"]
    for name, rows in measured.items():
        for ranks, values in rows.items():
            cells = [f"{v:.3e} ({v / one:.3f})" for v, one in zip(values, rows[0], strict=True)]
            lines.append(f"| {name} | {ranks or 'one call'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(args: argparse.Namespace, content: str) -> str:
    """Return the table with all that is needed to measure it again."""
    if torch.device(args.device).type == "cpu":
        device = f"CPU, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    else:
        device = torch.cuda.get_device_name(args.device)
    command = shlex.join(["python", "scripts/bench/accuracy.py", *sys.argv[1:]])
    return f"""# Error of bfloat16 attention against the number of ranks

Relative error (Frobenius norm) of causal attention against dense attention in float64; in brackets
the ratio to one call of the same kernel on the whole sequence. {args.tokens} tokens, head size
{args.head_dim}, mean of {args.seeds} seeds, inputs normal with variance 1. Flat kv ring, zigzag;
gradients are summed and travel in float32. The ranks are simulated in one process.

* date: {datetime.date.today()}
* device: {device}; kernel: {args.kernel}
* versions: torch {torch.__version__}, Python {platform.python_version()}
* command: `{command}`

{content}
"""


def parse() -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=about[0], epilog=about[2])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=3, help="inputs to average over")
    parser.add_argument("--kernel", default="auto", help="as --burst-kernel")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="default: DATE_DEVICE_... in results/")
    args = parser.parse_args()
    if min(args.tokens, args.head_dim, args.seeds, *args.ranks) < 1:
        parser.error("--tokens, --head-dim, --seeds and --ranks must be positive")
    name = f"{datetime.date.today()}_{torch.device(args.device).type}_bf16_error_against_ranks.md"
    args.output = args.output or HERE / "results" / name
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(1)  # the ranks are threads already
    try:
        content = table({name: errors(args, heads) for name, heads in HEADS.items()})
    except ValueError as error:
        sys.exit(f"accuracy: {error}")
    print(content)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(args, content))
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
