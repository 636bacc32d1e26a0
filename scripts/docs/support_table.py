"""Writes docs/support.md: what runs with what, asked of the code that refuses the rest.

python scripts/docs/support_table.py [--write docs/support.md]
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megatron_burst.config import Algorithm, BurstConfig, LayoutName, Topology
from megatron_burst.kernels import KERNELS, Kernel, Request
from megatron_burst.plans.cost import Shape
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import choose, make_layout
from megatron_burst.plans.simulator import simulate
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid
from megatron_burst.plugin.limits import LIMITS, LM_HEAD_LIMITS

YES = "yes"
RANKS, TOKENS = 4, 64
GRIDS = {Topology.FLAT: Grid(((0, 1, 2, 3),)), Topology.DOUBLE: Grid(((0, 1), (2, 3)))}
MASKS: Mapping[str, Mask] = {
    "causal": Mask.causal(),
    "full": Mask.full(),
    "sliding window": Mask.causal(window=9),
    "documents": Mask.causal(documents=(0, 3, 17, 50, TOKENS)),
    "blocks": Mask.causal(block_table=torch.arange(16).view(4, 4) % 3 != 1),
    "all of them": Mask.causal(
        window=9,
        documents=(0, 3, 17, 50, TOKENS),
        block_table=torch.arange(16).view(4, 4) % 3 != 1,
    ),
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "--burst-backward query": {"backward": "query"},
    "--burst-backward kv": {"backward": "kv"},
    "--burst-topology double": {"topology": "double"},
    "--burst-head-parallel-size 2": {"head_parallel_size": 2},
    "--burst-layout segmented-zigzag": {"layout": "segmented-zigzag"},
    "--burst-grad-dtype model": {"grad_dtype": "model"},
    "--recompute-attention-fraction 0.5": {"recompute_fraction": 0.5},
}
USUAL = Request(torch.device("cpu"), torch.bfloat16, 8, 8, 64, 64)
REQUESTS: Mapping[str, Request] = {
    "float16": replace(USUAL, dtype=torch.float16),
    "float32": replace(USUAL, dtype=torch.float32),
    "float64": replace(USUAL, dtype=torch.float64),
    "grouped kv heads": replace(USUAL, kv_heads=2),
    "head size 128": replace(USUAL, head_dim=128, value_head_dim=128),
    "head size 256": replace(USUAL, head_dim=256, value_head_dim=256),
    "K of 192, V of 128 (MLA)": replace(USUAL, head_dim=192, value_head_dim=128),
    "windows, and layouts that make bands": replace(USUAL, is_banded=True),
    "documents": replace(USUAL, has_documents=True),
    "soft cap": replace(USUAL, soft_cap=30.0),
}


_TOP = """\
# What runs with what

<!-- written by python scripts/docs/support_table.py --write docs/support.md -->

A cell that is not "yes" says why not, in the words of the error. Sinks (`--softmax-type`) are a
term of the merge, and run with every kernel.
"""
_MASKS = """\
## Masks, layouts and rings

For each cell the plans of four ranks were made and simulated, on a flat ring and on a double one.
Ulysses has whole sequences on every rank. `contiguous` and `striped` are layouts of the library,
without a flag.
"""
_SETTINGS = "## Settings\n"
_KERNELS = """\
## Kernels

bfloat16 with heads of 64 is the usual case; each row changes one thing. On which devices and with
which packages a kernel runs, the log says at the start of a run.
"""


def page() -> str:
    """Return the whole page."""
    algorithms = [*Algorithm]
    sections = (
        (_MASKS, ["mask, layout", *algorithms], _mask_rows(algorithms)),
        (_SETTINGS, ["setting", *algorithms], _setting_rows(algorithms)),
        (_KERNELS, ["request", *KERNELS], _kernel_rows()),
        ("## What attention refuses of Megatron\n", ["argument", "why"], _limit_rows(LIMITS)),
        (
            "## What the chunked loss refuses of Megatron\n",
            ["argument", "why"],
            _limit_rows(LM_HEAD_LIMITS),
        ),
    )
    parts = [f"{text}\n{_markdown(head, rows)}\n" for text, head, rows in sections]
    return "\n".join((_TOP, *parts))


def _mask_rows(algorithms: Sequence[Algorithm]) -> Iterator[list[str]]:
    for layout, (name, mask) in product(LayoutName, MASKS.items()):
        yield [f"{name}, {layout}", *(_planned(a, layout, mask) for a in algorithms)]


def _planned(algorithm: Algorithm, layout: LayoutName, mask: Mask) -> str:
    """Make and simulate the plans; a wrong one raises."""
    sizes = Shape(TOKENS // RANKS, 8, 8, 8, 8, 2, 4).item_bytes()
    for topology, grid in () if algorithm is Algorithm.ULYSSES else GRIDS.items():
        config = BurstConfig(algorithm=algorithm, layout=layout, topology=topology)
        tiling = Tiling(make_layout(config, TOKENS, RANKS), mask)
        nodes = [grid.coordinates(rank)[0] for rank in range(RANKS)]
        choice = choose(config, tiling, grid, sizes, nodes)
        pairs = sum(tile.pairs for tile in tiling.all())
        plans = [choice.plans(rank) for rank in range(RANKS)]
        simulate([p.forward for p in plans], backward=False, pairs=pairs)
        simulate([p.backward for p in plans], backward=True, pairs=pairs)
    return YES


def _setting_rows(algorithms: Sequence[Algorithm]) -> Iterator[list[str]]:
    for name, settings in SETTINGS.items():
        yield [f"`{name}`", *(_accepted(a, settings) for a in algorithms)]


def _accepted(algorithm: Algorithm, settings: Mapping[str, Any]) -> str:
    try:
        BurstConfig(algorithm=algorithm, **settings)
    except ValueError as error:
        return str(error)
    return YES


def _kernel_rows() -> Iterator[list[str]]:
    for name, request in REQUESTS.items():
        yield [name, *(_served(kernel, request) for kernel in KERNELS.values())]
    usual = [kernel.reasons_against(USUAL) for kernel in KERNELS.values()]
    with _deterministic():
        yield [
            "deterministic mode",
            *(
                _added(k.reasons_against(USUAL), u)
                for k, u in zip(KERNELS.values(), usual, strict=True)
            ),
        ]


def _served(kernel: Kernel, request: Request) -> str:
    """Say what this request adds to the reasons against the usual one, which are the device's."""
    usual = kernel.reasons_against(USUAL)
    added = _added(kernel.reasons_against(request), usual)
    of_one_size = replace(request, value_head_dim=request.head_dim)
    if added != YES and _added(kernel.reasons_against(of_one_size), usual) == YES:
        return f"{YES}, V padded with zeros"
    return added


def _added(reasons: Sequence[str], usual: Sequence[str]) -> str:
    return "; ".join(reason for reason in reasons if reason not in usual) or YES


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _limit_rows(limits: Mapping[str, str]) -> Iterator[list[str]]:
    return ([f"`{name}`", reason] for name, reason in limits.items())


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '\\|') for cell in line)} |" for line in lines
    )


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python scripts/docs/support_table.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page to FILE")
    args = parser.parse_args(argv)
    if args.write is None:
        sys.stdout.write(page())
    else:
        args.write.write_text(page())


if __name__ == "__main__":
    main()
