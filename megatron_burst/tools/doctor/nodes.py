"""How the context-parallel groups of a job lie on its nodes, and which rings they make."""

from argparse import Namespace
from collections import Counter

from megatron_burst.config import Algorithm, BurstConfig, Topology
from megatron_burst.plans.head_parallel import head_groups
from megatron_burst.plans.topology import choose_grid
from megatron_burst.tools.doctor.check import Finding, Level, Target


def findings(args: Namespace, config: BurstConfig | None, target: Target) -> list[Finding]:
    """Say what rings the groups make; an error where heads cannot be shared out in a node.

    Args:
        args: as they were given.
        config: of our attention; None under Megatron's own.
        target: its nodes count ranks in order, as torchrun does.
    """
    size = args.context_parallel_size
    groups = _groups(args.tensor_model_parallel_size, size, target.ranks)
    if size == 1 or not groups:
        return [Finding("grid", Level.NOTE, f"{target}; context parallelism of {size}: no rings")]
    try:
        kinds = Counter(_kind(group, args, config, target) for group in groups)
    except ValueError as error:
        return [Finding("grid", Level.ERROR, str(error))]
    return [
        Finding("grid", Level.NOTE, f"{count} x {size} context-parallel ranks: {kind}")
        for kind, count in kinds.items()
    ]


def _groups(tensor: int, context: int, ranks: int) -> list[list[int]]:
    """Megatron counts ranks in the order tensor, context, data, pipeline."""
    span = tensor * context
    if ranks % span:
        return []
    starts = (base + offset for base in range(0, ranks, span) for offset in range(tensor))
    return [list(range(start, start + span, tensor)) for start in starts]


def _kind(group: list[int], args: Namespace, config: BurstConfig | None, target: Target) -> str:
    per_node = target.ranks_per_node
    places = [rank // per_node for rank in group]
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
    baseline = config.algorithm is not Algorithm.BURST and config.topology is Topology.AUTO
    topology = Topology.FLAT if baseline else config.topology
    ring_places = [places[members[0]] for members in heads.groups]
    grid, why_flat = choose_grid(topology, ring_places)
    shared = f"heads over {heads.size} ranks, " if heads.size > 1 else ""
    flat = f" ({why_flat})" if why_flat else ""
    return f"{shared}{grid}{flat}, {_nodes(places)}"


def _nodes(places: list[int]) -> str:
    count = len(set(places))
    return "on one node" if count == 1 else f"on {count} nodes"
