"""The only place that makes process groups: one communicator for each ring."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class RingGroups:
    """Two communicators over the same ranks, so that neither ring's messages wait for the other's.

    `read` carries blocks (K and V), `gradient` the sums that come back.
    """

    read: dist.ProcessGroup
    gradient: dist.ProcessGroup


def ring_groups(group: dist.ProcessGroup) -> RingGroups:
    """Adopt `group` for the read ring and make its twin for the gradient ring.

    Only the ranks of `group` take part: other context-parallel groups of the job do it for
    themselves.
    """
    ranks = dist.get_process_group_ranks(group)
    # The members alone synchronise, so groups of different pipeline stages need not meet.
    twin = dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True)
    return RingGroups(read=group, gradient=twin)
