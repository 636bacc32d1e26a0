"""The process groups of a context-parallel group: where its ranks are, and who is on a channel.

Reads and gradients, within nodes and between them, overlap; on one communicator they would wait for
each other. A channel reaches the ranks that its messages reach, and no others: see `nccl`. What
ranks compare goes by a group of its own: a rank that compares while another already sends must meet
no message.
"""

import os
import socket
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_burst.plans.choice.ctas import max_ctas
from megatron_burst.plans.choice.head_parallel import HeadGroups
from megatron_burst.plans.schedules.plan import Channel
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.transport.backend import backends
from megatron_burst.transport.nccl import options_like
from megatron_burst.transport.objects import gather_objects

type Hierarchy = Sequence[dist.ProcessGroup] | None  # a caller's, within nodes and between them
type Members = tuple[tuple[int, ...], ...]  # the ranks of each process group of a channel

_MAKE = "make process groups with the whole job"


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank of a context-parallel group."""

    channels: Mapping[Channel, dist.ProcessGroup]
    agreement: dist.ProcessGroup
    """For comparisons: on gloo, so that nobody waits for a device, and never a channel."""


def nodes_of_ranks(
    group: dist.ProcessGroup,
    timeout_seconds: float,
    hierarchy: Hierarchy = None,
    ranks_per_node: int | None = None,
) -> list[Hashable]:
    """Return the node of each rank of `group`, as any value that equal nodes share; a collective.

    It is the first group of the hierarchy, or counted by `ranks_per_node`, or a host name and
    torchrun's number of the node (two launchers on one host are two nodes, as they were told).
    """
    rank = dist.get_rank()
    node: Hashable
    if hierarchy is not None:
        node = tuple(dist.get_process_group_ranks(hierarchy[0]))
    elif ranks_per_node is not None:
        node = rank // ranks_per_node
    else:
        node = (socket.gethostname(), os.environ.get("GROUP_RANK"))
    return gather_objects(group, "learn where the other ranks are", node, timeout_seconds)


def members_of_channels(grid: Grid, heads: HeadGroups) -> dict[Channel, Members]:
    """Return the ranks of a context-parallel group that a message of each channel is between.

    `grid` is of the ranks of a ring, of which there are `heads.size`. A rank is in one group of
    every channel.
    """
    rings = [heads.ring(index) for index in range(heads.size)]

    def of_rings(lines: Iterable[Sequence[int]]) -> Members:
        return tuple(tuple(ring[i] for i in line) for line in lines for ring in rings)

    members: dict[Channel, Members] = {}
    if grid.ranks_per_node > 1:
        within = Channel.READ_WITHIN, Channel.READ_ACROSS, Channel.GRADIENT_WITHIN
        members |= dict.fromkeys(
            within if grid.ranks_per_node > 2 else within[::2], of_rings(grid.rows)
        )
    if grid.nodes > 1:
        columns = of_rings([*zip(*grid.rows, strict=True)])
        members |= dict.fromkeys((Channel.READ_BETWEEN, Channel.GRADIENT_BETWEEN), columns)
    if min(grid.nodes, grid.ranks_per_node) > 1:
        direct = of_rings([range(grid.ranks)])
        members |= dict.fromkeys((Channel.READ_DIRECT, Channel.GRADIENT_DIRECT), direct)
    if heads.size > 1:
        members[Channel.HEADS] = heads.groups
    return members


def make_groups(
    group: dist.ProcessGroup,
    grid: Grid,
    heads: HeadGroups,
    local: int,
    timeout_seconds: float,
    hierarchy: Hierarchy = None,
) -> Groups:
    """Return a group for each channel of an all-to-all and rings on `grid`, and for agreement.

    A node has `local` ranks of the group, whatever rows the grid has.
    A collective call of all ranks of the job, each with its own group. Groups that only their
    members make (`use_local_synchronization`) would save nothing, for torch has no barrier in
    `new_group`: 12 us a group of others. And torch names those by how many groups a rank is in,
    which may differ among them, and NCCL cannot make them where the job is bound to devices.
    """
    assert dist.group.WORLD is not None
    ranks = dist.get_process_group_ranks(group)
    ours = tuple(
        (channel, tuple(ranks[rank] for rank in group_ranks))
        for channel, members in members_of_channels(grid, heads).items()
        for group_ranks in members
    )
    every = gather_objects(dist.group.WORLD, _MAKE, (tuple(ranks), ours), timeout_seconds)
    limit, channels = timedelta(seconds=timeout_seconds), dict[Channel, dist.ProcessGroup]()
    for whose, wanted in dict.fromkeys(every):
        for channel, group_ranks in wanted:
            options = None
            if dist.get_rank() in group_ranks and backends(None).get("cuda") == dist.Backend.NCCL:
                most = max_ctas(channel, len(group_ranks), local)
                options = options_like((group, *(hierarchy or ())), limit, most)
            said = f"burst {channel}"
            made = dist.new_group(group_ranks, limit, pg_options=options, group_desc=said)
            if dist.get_rank() in group_ranks:
                channels[channel] = made
        said = "burst agreement"
        made = dist.new_group(whose, limit, backend=dist.Backend.GLOO, group_desc=said)
        if dist.get_rank() in whose:
            agreement = made
    return Groups(channels, agreement)
