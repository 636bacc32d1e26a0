"""The attention that a command line asks for: its rings on the nodes, its tiles, its kernel."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_burst.config import Algorithm, BurstConfig
from megatron_burst.kernels import KERNELS, Request, select_kernel
from megatron_burst.plans.head_parallel import head_groups
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import make_layout
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import choose_grid
from megatron_burst.tools.doctor.situation import Finding, Level, Target


def grid_findings(args: Namespace, config: BurstConfig | None, target: Target) -> Iterator[Finding]:
    """Yield what rings the groups make; an error where heads cannot be shared out in a node.

    Megatron counts ranks in the order tensor, context, data, pipeline, and torchrun by nodes.

    Args:
        args: as they were given.
        config: of our attention; None under Megatron's own.
        target: the nodes of the job.
    """
    tensor, size = args.tensor_model_parallel_size, args.context_parallel_size
    span = tensor * size
    if size == 1 or target.ranks % span:
        text = f"{target}; context parallelism of {size}: no rings"
        yield Finding("grid", Level.NOTE, text)
        return
    firsts = (base + i for base in range(0, target.ranks, span) for i in range(tensor))
    try:
        kinds = Counter(
            _kind(range(first, first + span, tensor), args, config, target) for first in firsts
        )
    except ValueError as error:
        yield Finding("grid", Level.ERROR, str(error))
        return
    for kind, count in kinds.items():
        yield Finding("grid", Level.NOTE, f"{count} x {size} context-parallel ranks: {kind}")


def _kind(group: range, args: Namespace, config: BurstConfig | None, target: Target) -> str:
    places = [rank // target.ranks_per_node for rank in group]
    if config is None:
        return f"Megatron's own context parallelism, {_nodes(places)}"
    if args.hierarchical_context_parallel_sizes:
        within = args.hierarchical_context_parallel_sizes[0]
        places = [i // within for i in range(len(group))]
    elif config.ranks_per_node is not None:
        places = [rank // config.ranks_per_node for rank in group]
    if config.algorithm is Algorithm.ULYSSES:
        return f"an all-to-all, {_nodes(places)}"
    heads = head_groups(places, config.head_parallel_size)
    nodes = [places[members[0]] for members in heads.groups]
    grid, why_flat = choose_grid(config.shape_of_rings, nodes)
    shared = f"heads over {heads.size} ranks, " if heads.size > 1 else ""
    flat = f" ({why_flat})" if why_flat else ""
    return f"{shared}{grid}{flat}, {_nodes(places)}"


def _nodes(places: list[int]) -> str:
    count = len(set(places))
    return "on one node" if count == 1 else f"on {count} nodes"


def request_of(args: Namespace, config: BurstConfig | None, target: Target) -> Request | None:
    """Return what a kernel is asked; None under Megatron's own attention, or without a model."""
    heads = args.num_attention_heads
    size = args.kv_channels or (heads and args.hidden_size and args.hidden_size // heads)
    sizes = (size, size)
    if args.multi_latent_attention:
        sizes = args.qk_head_dim + args.qk_pos_emb_head_dim, args.v_head_dim
    if config is None or not heads or not all(sizes):
        return None
    kv_heads = args.num_query_groups if args.group_query_attention else heads
    tensor = args.tensor_model_parallel_size
    return Request(
        torch.device(target.device),
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
        heads // tensor,
        max(kv_heads // tensor, 1),
        *sizes,
        is_banded=_has_bands(args, config),
        has_documents=args.dataloader_inter_document_masking,
    )


def _has_bands(args: Namespace, config: BurstConfig) -> bool:
    """Whether the layout and the window make tiles that are neither full nor causal squares."""
    window = args.window_size[0] if args.window_size and args.window_size[0] >= 0 else None
    if not args.seq_length:
        return window is not None
    try:
        layout = make_layout(config, args.seq_length, args.context_parallel_size)
    except ValueError:
        return window is not None
    return Tiling(layout, Mask.causal(window=window)).needs.is_banded


@dataclass(frozen=True, slots=True)
class Served:
    """One kernel's answer to a request: no reasons against it, or these."""

    kernel: str
    reasons: tuple[str, ...]
    is_taken: bool


def served(request: Request, target: Target, asked: str = "auto") -> list[Served]:
    """Ask every kernel, in the order in which `auto` does; `asked` is that of --burst-kernel."""
    with target.pretended():
        try:
            taken = select_kernel(asked, request).name.split(" ")[0]
        except ValueError:
            taken = ""
        return [
            Served(name, tuple(kernel.reasons_against(request)), taken == name)
            for name, kernel in KERNELS.items()
        ]
