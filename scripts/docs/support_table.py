"""What runs with what, asked of the code that refuses the rest."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_burst.config import Algorithm, BurstConfig, LayoutName, Topology
from megatron_burst.kernels import KERNELS, Kernel, Request
from megatron_burst.plans.balance.balanced import balanced
from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.choice.planning import Choice, choose
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plugin.limits import (
    DEV_LIMITS,
    LATENT_LIMITS,
    LIMITS,
    LM_HEAD_LIMITS,
    MLP_LIMITS,
    flag_of,
)

YES = "yes"
RANKS, TOKENS = 4, 64
GRIDS = {Topology.FLAT: Grid(((0, 1, 2, 3),)), Topology.DOUBLE: Grid(((0, 1), (2, 3)))}
DOCUMENTS, BLOCKS = (0, 3, 17, 50, TOKENS), torch.arange(16).view(4, 4) % 3 != 1
MASKS: Mapping[str, Mask] = {
    "causal": Mask.causal(),
    "full": Mask.full(),
    "sliding window": Mask.causal(window=9),
    "documents": Mask.causal(documents=DOCUMENTS),
    "blocks": Mask.causal(block_table=BLOCKS),
    "all of them": Mask.causal(window=9, documents=DOCUMENTS, block_table=BLOCKS),
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "--burst-backward query": {"backward": "query"},
    "--burst-backward kv": {"backward": "kv"},
    "--burst-topology double": {"topology": "double"},
    "--burst-topology mesh": {"topology": "mesh"},
    "--burst-head-parallel-size 2": {"head_parallel_size": 2},
    "--burst-head-chunks 2": {"head_chunks": 2},
    "--burst-layout segmented-zigzag": {"layout": "segmented-zigzag"},
    "--burst-layout balanced": {"layout": "balanced"},
    "--burst-grad-dtype model": {"grad_dtype": "model"},
    "--burst-mla latent": {"mla": "latent"},
    "--recompute-attention-fraction 0.5": {"recompute_fraction": 0.5},
}
USUAL = Request(torch.device("cpu"), torch.bfloat16, 8, 8, 64, 64)
REQUESTS: Mapping[str, Request] = {
    "float16": replace(USUAL, dtype=torch.float16),
    "float32": replace(USUAL, dtype=torch.float32),
    "grouped kv heads": replace(USUAL, kv_heads=2),
    "head size 128": replace(USUAL, head_dim=128, value_head_dim=128),
    "head size 256": replace(USUAL, head_dim=256, value_head_dim=256),
    "K of 192, V of 128 (MLA)": replace(USUAL, head_dim=192, value_head_dim=128),
    "windows, and layouts that make bands": replace(USUAL, is_banded=True),
    "documents": replace(USUAL, has_documents=True),
    "soft cap": replace(USUAL, soft_cap=30.0),
}
type Table = tuple[list[str], Iterable[list[str]]]  # its head and its rows


def tables() -> dict[str, Table]:
    """Return the tables of the page, by their names there."""
    limits = ["argument", "why"]
    return {
        "masks": (["layout", "masks", *Algorithm], _grouped(_mask_rows())),
        "settings": (["setting", *Algorithm], _grouped(_setting_rows())),
        "kernels": _kernels(),
        "attention": (limits, limit_rows({**LIMITS, **DEV_LIMITS})),
        "latents": (limits, limit_rows(LATENT_LIMITS)),
        "loss": (limits, limit_rows(LM_HEAD_LIMITS)),
        "mlp": (limits, limit_rows(MLP_LIMITS)),
    }


def _columns_grouped(head: list[str], rows: Iterable[list[str]]) -> Table:
    """Put columns with equal cells into one."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in zip(head, *rows, strict=True):
        names.setdefault(tuple(cells), []).append(name)
    return [", ".join(alike) for alike in names.values()], map(list, zip(*names, strict=True))


def _grouped(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """Make one row of those whose cells are the same but for the first."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault(tuple(cells), []).append(name)
    return ([", ".join(names), *cells] for cells, names in alike.items())


def _mask_rows() -> Iterator[list[str]]:
    """A row for the masks of a layout whose cells are the same."""
    for layout in [*LayoutName][1:]:  # auto is zigzag there
        masks = ["documents"] if layout is LayoutName.BALANCED else [*MASKS]
        rows = ([name, *(_planned(a, layout, MASKS[name]) for a in Algorithm)] for name in masks)
        yield from ([layout, *row] for row in _grouped(rows))


def _planned(algorithm: Algorithm, layout: LayoutName, mask: Mask) -> str:
    """Make the plans; what cannot be planned raises."""
    for choice in choices(algorithm, layout, mask):
        choice.plans(0)
    return YES


def choices(algorithm: Algorithm, layout: LayoutName, mask: Mask) -> Iterator[Choice]:
    """Yield the schedules of a cell, a grid of ranks after the other."""
    shape = Shape(TOKENS // RANKS, 8, 8, 8, 8, 2, 4)
    for topology, grid in () if algorithm is Algorithm.ULYSSES else GRIDS.items():
        config = BurstConfig(algorithm=algorithm, layout=layout, topology=topology)
        nodes = [grid.coordinates(rank)[0] for rank in range(RANKS)]
        held = make_layout(config, TOKENS, RANKS)
        if layout is LayoutName.BALANCED and mask.documents and not mask.block_table:
            held = balanced(mask, TOKENS, nodes).layout
        yield choose(config, Tiling(held, mask), grid, shape, nodes)


def _setting_rows() -> Iterator[list[str]]:
    for name, settings in SETTINGS.items():
        yield [f"`{name}`", *(_accepted(a, settings) for a in Algorithm)]


def _accepted(algorithm: Algorithm, settings: Mapping[str, Any]) -> str:
    try:
        BurstConfig(algorithm=algorithm, **settings)
    except ValueError as error:
        return "no effect" if "has no effect under" in str(error) else str(error)
    return YES


def _kernels() -> Table:
    """Who serves a request, and in a last column why others do not."""
    rows = []
    for name, *cells in _grouped(_kernel_rows()):
        reasons = dict.fromkeys(cell for cell in cells if not cell.startswith(YES))
        short = [cell if cell.startswith(YES) else "no" for cell in cells]
        rows.append([name, *short, "; ".join(reasons)])
    return _columns_grouped(["request", *KERNELS, "why"], rows)


def _kernel_rows() -> Iterator[list[str]]:
    for name, request in REQUESTS.items():
        yield [name, *(_served(kernel, request) for kernel in KERNELS.values())]
    usual = [kernel.reasons_against(USUAL) for kernel in KERNELS.values()]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    strict = [kernel.reasons_against(USUAL) for kernel in KERNELS.values()]
    torch.use_deterministic_algorithms(before)
    yield ["deterministic mode", *map(_added, strict, usual)]


def _served(kernel: Kernel, request: Request) -> str:
    """Say what this request adds to the reasons against the usual one, which are the device's."""
    usual = kernel.reasons_against(USUAL)
    added = _added(kernel.reasons_against(request), usual)
    of_one_size = replace(request, value_head_dim=request.head_dim)
    if added != YES and _added(kernel.reasons_against(of_one_size), usual) == YES:
        return f"{YES}, padded"
    return added


def _added(reasons: Sequence[str], usual: Sequence[str]) -> str:
    return "; ".join(reason for reason in reasons if reason not in usual) or YES


def limit_rows(limits: Mapping[str, str]) -> Iterator[list[str]]:
    """A row for those with one reason; without the remedy to drop it, which is the usual one."""
    return _grouped([f"`{name}`", _reason(name, text)] for name, text in limits.items())


def _reason(name: str, text: str) -> str:
    text = re.sub(rf"(drop {flag_of(name)}|leave {name} off)(?=,|$)", "drop it", text)
    return text.removesuffix(": drop it")
