"""How many CTAs of NCCL a communicator of ours may have: channels, each on an SM of its own.

A pair within a node has buffers on every channel, used or not, of which a message of up to 16 MiB
takes one for every so many ranks as there are (see tools/plan/nccl.py, from NCCL's sources). So a
communicator has as many as memory allows for those that a rank receives from there: a ring's reads,
which come from one rank, many; gradients that go straight home, from all others, few.
"""

from megatron_burst.plans.schedules.plan import Channel

_MIB = 2**20
_PAIR = 12 * _MIB  # of a channel from a peer of the node and one to it
# A hundredth of an H100's memory, and 8 channels for 7 peers: an all-to-all, for which all ranks
# wait, goes to 7 at once. Rings of 1024 to 8192 tokens a rank are as fast with 4.
_BUDGET = 768 * _MIB
_MOST = 32  # as many as NCCL makes in a node of H100 or B200
_LEAST = 2  # over the budget from 33 peers on: by one channel gradients of 4096 tokens took twice
_BETWEEN_NODES = 8  # where two to four carry all that a NIC does, and one to four go to a peer


_PEERS = {  # of a row, from which a rank receives; of a whole one L - 1
    Channel.READ_WITHIN: 1,
    Channel.READ_ACROSS: -2,
    Channel.GRADIENT_WITHIN: -1,
    Channel.HEADS: -1,
}


def max_ctas(channel: Channel, ranks: int, local: int) -> int:
    """Return the option of a communicator of so many ranks, where a node has `local`.

    The largest power of two from 2 to 32 with which it takes at most 768 MiB; 8 between nodes.
    """
    if channel not in _PEERS or ranks > local:
        return _BETWEEN_NODES
    peers = _PEERS[channel] if _PEERS[channel] > 0 else max(1, ranks + _PEERS[channel])
    room = _BUDGET // (_PAIR * peers)
    return min(_MOST, max(_LEAST, 1 << room.bit_length() >> 1))
