"""NCCL's point-to-point messages: channels, thread blocks and buffers, as its sources choose them.

As 2.28 does, which torch 2.11 has (from 2.29 on a peer on another node may have more channels); of
2.27.7, 2.28.9, 2.29.7 and 2.30.7 on GPUs that reach each other by NVLink through switches, with
GPUDirect RDMA and none of NCCL's environment variables. By the names of its sources: graph/paths.cc
has the channels of a peer, graph/connect.cc those of a communicator, enqueue.cc those of a message,
init.cc the sizes of chunks and buffers, transport/p2p.cc and net.cc who allocates them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.tools.plan.cluster import Cluster

_MIB = 2**20
# A channel from a peer of the node has buffers of three protocols, 4 + 4.69 + .5 MiB, one to it a
# page; both are made of 2 MiB each. (Ampere has 6 on either side.)
_RECEIVING, _SENDING = 10 * _MIB, 2 * _MIB
_POOL = 16 * 2**17  # of a channel between nodes, each way, whoever the peers are
_FAST = 25e9  # bytes/s of a NIC that has two rings


class Peers(NamedTuple):
    """With how many ranks a rank has messages, of its node and of others."""

    senders: int = 0  # of its node
    receivers: int = 0
    far_senders: int = 0
    far_receivers: int = 0


class Communicator(NamedTuple):
    """What NCCL decides for a group of ranks when it is made."""

    nodes: int
    ranks: int
    channels: int  # and so many thread blocks at the most, each on an SM of its own
    a_peer: int  # channels that are connected to a peer, and a message may take

    def channels_of(self, size: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many channels messages of so many bytes are spread over.

        Parts of 64 KiB at least; more channels while parts are over 16 MiB, or over 128 KiB where
        the group has several nodes. As if all ranks had messages, at first as many as do not meet.
        """
        least_part, most_part = 2**16, 2**17 if self.nodes > 1 else 2**24
        least = self.a_peer
        while least > 1 and least * self.ranks > self.channels:
            least //= 2
        count = np.clip(-(-size // least_part), 1, least)
        for _ in range(self.a_peer.bit_length()):
            doubled = (-(-size // count) > most_part) & (count <= self.a_peer // 2)
            count = np.where(doubled, 2 * count, count)
        return count

    def buffers(self, peers: Peers) -> int:
        """Return the bytes of a GPU that they take."""
        size = self.a_peer * (peers.senders * _RECEIVING + peers.receivers * _SENDING)
        pools = (peers.far_senders > 0) + (peers.far_receivers > 0)
        return size + pools * self.channels * _POOL


def communicator(machine: Cluster, nodes: int, local_ranks: int, max_ctas: int) -> Communicator:
    """Return that of a group with so many ranks on each of so many nodes.

    Counts of channels are rounded up to powers of two. A peer has two channels a NVLink; one on
    another node has few, and then all peers of the group do.
    """
    ranks = nodes * local_ranks
    most = min(machine.channels if nodes == 1 else _rings(machine, local_ranks), max_ctas)
    channels, near = _power_of_two(most), 2 * machine.nvlinks
    if nodes == 1:
        return Communicator(1, ranks, channels, min(_power_of_two(near), channels))
    far = 2 if 2 * ranks <= 4 * most else 1
    a_peer = _power_of_two(min(near, far) if local_ranks > 1 else far)
    return Communicator(nodes, ranks, channels, min(a_peer, channels))


def _rings(machine: Cluster, local_ranks: int) -> int:
    """Channels of a communicator between nodes with so many GPUs of each."""
    nics = max(1, local_ranks // machine.gpus_per_nic)
    return 2 * nics * (2 if nics <= 4 and machine.nic_rate >= _FAST else 1)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
