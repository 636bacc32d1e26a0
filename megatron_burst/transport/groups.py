"""The process groups of a context-parallel group: its rank grid and a communicator a channel.

Reads and gradients, within nodes and between them, overlap; on one communicator they would wait for
each other. The first channel is the caller's own group. What ranks compare goes by a group of its
own: a rank that compares while another already sends must meet no message.
"""

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_burst.config import BurstConfig
from megatron_burst.plans.plan import Channel
from megatron_burst.plans.topology import Grid
from megatron_burst.transport.comm import gather_objects


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups that the ranks of one context-parallel group share."""

    channels: Mapping[Channel, dist.ProcessGroup]
    agreement: dist.ProcessGroup
    """For comparisons: on gloo, so that nobody waits for a device, and never a channel."""


def nodes_of_ranks(
    config: BurstConfig,
    group: dist.ProcessGroup,
    hierarchy: Sequence[dist.ProcessGroup] | None,
) -> list[Hashable]:
    """Return the node of each rank of `group`, as any value that equal nodes share; a collective.

    It is the first group of the hierarchy, or counted by `ranks_per_node`, or a host name and
    torchrun's number of the node (two launchers on one host are two nodes, as they were told).
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


def make_groups(
    config: BurstConfig,
    group: dist.ProcessGroup,
    grid: Grid,
    hierarchy: Sequence[dist.ProcessGroup] | None,
    head_parallel_size: int = 1,
) -> Groups:
    """Return a group for each channel of an all-to-all and rings on `grid`, and for agreement.

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
    agreement = group
    for ranks, needed in dict.fromkeys(everybody):
        made = [dist.new_group(ranks, timeout=limit) for _ in needed]
        of_gloo = dist.new_group(ranks, timeout=limit, backend=dist.Backend.GLOO)
        if ranks == ours:
            channels.update(zip(needed, made, strict=True))
            agreement = of_gloo
    return Groups(channels, agreement)


def make_gloo_group(group: dist.ProcessGroup, timeout_seconds: float) -> dist.ProcessGroup | None:
    """Return one of the same ranks for what a thread exchanges, beside all else; None: one rank.

    A collective call of all ranks of the job, each with a group of as many.
    """
    if group.size() == 1:
        return None
    assert dist.group.WORLD is not None
    ours, found = tuple(dist.get_process_group_ranks(group)), None
    purpose = "make process groups with the whole job"
    everybody = gather_objects(dist.group.WORLD, purpose, ours, timeout_seconds)
    limit = timedelta(seconds=timeout_seconds)
    for ranks in dict.fromkeys(everybody):
        made = dist.new_group(ranks, timeout=limit, backend=dist.Backend.GLOO)
        found = made if ranks == ours else found
    return found


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
