"""Check attention over the ranks of this job against the unsharded reference, on this machine.

It needs neither Megatron nor data. Every rank draws its own tokens. The exit status is 1 if
anything differs or cannot run, and on one rank, where nothing is spread.
"""

import argparse
from collections.abc import Sequence

from megatron_burst.config import Algorithm, Backward, GradDtype, LayoutName, Topology
from megatron_burst.tools import options

_EXAMPLES = (
    "torchrun --nproc-per-node 8 -m megatron_burst verify",
    "torchrun --nproc-per-node 4 -m megatron_burst verify --dtype bfloat16 --mask window "
    "--heads 32 --kv-heads 8 --head-dim 128 --tokens-per-rank 2048",
)
MASKS = ("causal", "full", "window", "documents", "window+documents", "blocks")
KERNELS = ("flash3", "flash4", "cudnn", "flash2", "aten_flash", "cpu", "reference")
"""Those of `kernels.KERNELS`, in its order."""
_DTYPES = "float32", "bfloat16", "float16"


def parser() -> options.Parser:
    """Return what reads the words."""
    made = options.Parser("verify", __doc__, *_EXAMPLES)
    add = made.add_argument
    for name, values, tried in (
        ("--algorithm", list(Algorithm), ["burst"]),
        ("--backward", list(Backward), ["kv", "query"]),
        ("--mask", MASKS, ["causal", "window", "documents", "window+documents"]),
    ):
        text = f"which are tried (default: {' '.join(tried)})"
        add(name, nargs="+", choices=[*map(str, values)], default=tried, help=text)
    text = "which are tried (default: bfloat16, on a CPU float32, too)"
    add("--dtype", nargs="+", choices=_DTYPES, help=text)
    layouts = (LayoutName.ZIGZAG, LayoutName.SEGMENTED_ZIGZAG)
    for name, choices, text in (
        ("--topology", list(Topology), "the shape of the rings"),
        ("--layout", layouts, "which tokens a rank holds"),
        ("--grad-dtype", list(GradDtype), "of gradients while they are sent"),
        ("--kernel", ("auto", *KERNELS), "of a tile"),
        ("--backend", ("auto", "nccl", "gloo"), "auto is nccl with GPUs"),
        ("--device", ("auto", "cuda", "cpu"), "auto is the CPU with gloo; cuda shares GPUs there"),
    ):
        first, *others = map(str, choices)
        text = f"{text} (default: {first})"
        add(name, choices=[first, *others], default=first, help=text)
    for name, default, text in (
        ("--head-parallel-size", 1, "ranks over which the heads are spread (default: 1)"),
        ("--gpus-per-node", None, "as if so many shared a node (default: where they are)"),
        ("--heads", 8, "query heads of a rank, after tensor parallelism (default: 8)"),
        ("--kv-heads", None, "kv heads of a rank (default: 2 beside 8 heads, else as many)"),
        ("--head-dim", 64, "of Q and K (default: 64)"),
        ("--value-head-dim", None, "of V (default: that of --head-dim)"),
        ("--batch", 2, "sequences (default: 2)"),
    ):
        add(name, type=options.positive, metavar="N", default=default, help=text)
    text = "of a sequence, as 4096 or 4k (default: 256)"
    add("--tokens-per-rank", type=options.tokens, metavar="N", default=256, help=text)
    add("--sink", action="store_true", help="with a sink in every head")
    return made


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    args = parser().parse_args(words)
    args.kv_heads = args.kv_heads or (2 if args.heads == 8 else args.heads)
    args.value_head_dim = args.value_head_dim or args.head_dim
    return args
