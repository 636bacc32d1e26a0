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
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.transport.backend import nccl_options
from megatron_burst.transport.objects import gather_objects

type Hierarchy = Sequence[dist.ProcessGroup] | None  # a caller's, within nodes and between them

_MAKE = "make process groups with the whole job"


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups that the ranks of one context-parallel group share."""

    channels: Mapping[Channel, dist.ProcessGroup]
    agreement: dist.ProcessGroup
    """For comparisons: on gloo, so that nobody waits for a device, and never a channel."""


def nodes_of_ranks(
    config: BurstConfig, group: dist.ProcessGroup, hierarchy: Hierarchy
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
    hierarchy: Hierarchy,
    head_parallel_size: int = 1,
) -> Groups:
    """Return a group for each channel of an all-to-all and rings on `grid`, and for agreement.

    Streams of new channels have high priority where one of the caller's groups has, as Megatron's
    --high-priority-stream-groups makes them. A collective call of all ranks of the job, each with
    its own group, unless `group` is all of them: torch names a new group by how many there were,
    which has to agree.
    """
    wanted = channels_of(grid, head_parallel_size)
    adopted = _adopted(group, wanted, hierarchy)
    missing = tuple(channel for channel in wanted if channel not in adopted)
    has_priority = any(map(_has_high_priority, (group, *(hierarchy or ()))))
    made = _made(group, "agreement", config.timeout_seconds, missing, has_priority)
    return Groups({**adopted, **made.channels}, made.agreement)


def _made(
    group: dist.ProcessGroup,
    purpose: str,
    seconds: float,
    channels: tuple[Channel, ...] = (),
    has_priority: bool = False,
) -> Groups:
    """Make groups for channels and one on gloo, as all ranks of the job do for theirs."""
    assert dist.group.WORLD is not None
    ours, limit = (tuple(dist.get_process_group_ranks(group)), channels), timedelta(seconds=seconds)
    for ranks, needed in dict.fromkeys(gather_objects(dist.group.WORLD, _MAKE, ours, seconds)):
        made = {}
        for channel in needed:
            options = None  # torch writes into them: each group has its own
            if has_priority:
                options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            said = f"burst {channel}"
            made[channel] = dist.new_group(ranks, limit, pg_options=options, group_desc=said)
        of_gloo = dist.new_group(
            ranks, limit, backend=dist.Backend.GLOO, group_desc=f"burst {purpose}"
        )
        if (ranks, needed) == ours:
            found = Groups(made, of_gloo)
    return found


def _adopted(
    group: dist.ProcessGroup, wanted: Sequence[Channel], hierarchy: Hierarchy
) -> dict[Channel, dist.ProcessGroup]:
    """Return the caller's groups that serve as channels."""
    reads = (Channel.READ_WITHIN, Channel.READ_BETWEEN) if hierarchy else wanted[:1]
    given = zip(reads, hierarchy or (group,), strict=False)
    return {c: g for c, g in given if c in wanted}


def _has_high_priority(group: dist.ProcessGroup) -> bool:
    """Whether it was made so, as by Megatron's --high-priority-stream-groups."""
    return getattr(nccl_options(group), "is_high_priority_stream", False)


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
