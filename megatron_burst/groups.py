"""The process groups of a context-parallel group: its rank grid and a communicator a channel.

Reads and gradients, within nodes and between them, overlap; on one communicator they would wait for
each other. The first channel is the caller's own group.
"""

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_burst.comm import gather_objects
from megatron_burst.config import BurstConfig
from megatron_burst.plan import Channel
from megatron_burst.topology import Grid

type Channels = Mapping[Channel, dist.ProcessGroup]


def nodes_of_ranks(
    config: BurstConfig,
    group: dist.ProcessGroup,
    hierarchy: Sequence[dist.ProcessGroup] | None,
) -> list[Hashable]:
    """Return the node of each rank of `group`, as any value that equal nodes share; a collective.

    Where `hierarchy` is given, its first group is the node; else `ranks_per_node` of the config
    cuts the job's ranks into nodes; else a node is a host name and torchrun's number of the node
    (two launchers on one host are two nodes, as they were told).
    """
    rank = dist.get_rank()
    node: Hashable
    if hierarchy is not None:
        node = tuple(dist.get_process_group_ranks(hierarchy[0]))
    elif config.ranks_per_node is not None:
        node = rank // config.ranks_per_node
    else:
        node = (socket.gethostname(), os.environ.get("GROUP_RANK"))
    return gather_objects(group, "learn where the other ranks are", node, config.timeout_seconds)


def make_channels(
    config: BurstConfig,
    group: dist.ProcessGroup,
    grid: Grid,
    hierarchy: Sequence[dist.ProcessGroup] | None,
    head_parallel_size: int = 1,
) -> Channels:
    """Return a process group for each channel that an all-to-all and rings on `grid` use.

    A collective call of all ranks of the job, each with its own group, unless `group` is all of
    them: torch names a new group by how many there were, which has to agree.
    """
    assert dist.group.WORLD is not None
    wanted = channels_of(grid, head_parallel_size)
    given = dict(zip((Channel.READ_WITHIN, Channel.READ_BETWEEN), hierarchy or (), strict=False))
    channels = {channel: given[channel] for channel in wanted if channel in given}
    if wanted and not channels:
        channels[wanted[0]] = group
    missing = tuple(channel for channel in wanted if channel not in channels)
    ours = tuple(dist.get_process_group_ranks(group))
    everybody = gather_objects(
        dist.group.WORLD,
        "make process groups with the whole job",
        (ours, missing),
        config.timeout_seconds,
    )
    limit = timedelta(seconds=config.timeout_seconds)
    for ranks, needed in dict.fromkeys(everybody):
        for channel in needed:
            made = dist.new_group(ranks, timeout=limit)
            if ranks == ours:
                channels[channel] = made
    for channel in missing:  # NCCL wants all ranks of a group at its first use
        dist.barrier(channels[channel])
    return channels


def channels_of(grid: Grid, head_parallel_size: int = 1) -> tuple[Channel, ...]:
    """Return the channels that rings on `grid` use; the reads come first.

    The all-to-all of head parallelism goes with the reads within the node.
    """
    within: tuple[Channel, ...] = ()
    if grid.ranks_per_node > 1:
        within = (Channel.READ_WITHIN, Channel.GRADIENT_WITHIN)
    elif head_parallel_size > 1:
        within = (Channel.READ_WITHIN,)
    between = (Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN) if grid.nodes > 1 else ()
    return (*within, *between)
