"""What NCCL makes of messages, by hand from its sources, and of the plans' messages. (fast tier)"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_burst.config import BurstConfig
from megatron_burst.plans.choice.ctas import max_ctas
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.plan import Channel, Kind
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.tools.model import model_of
from megatron_burst.tools.plan import communicators, memory, timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.communicators import Use
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.nccl import Communicator, Peers, communicator
from megatron_burst.tools.plan.workload import Workload

CONFIGS = Configs.read()
MIB = 2**20
H100, A100, A800 = map(CONFIGS.cluster, ("h100", "a100", "a800"))


@pytest.mark.parametrize(
    ("machine", "nodes", "ranks", "most", "channels", "a_peer"),
    [
        # In a node: 24 rounded up, two a NVLink are 36 or 24 or 16, and no more than all.
        (H100, 1, 8, 64, 32, 32),
        (A100, 1, 8, 64, 32, 32),
        (A800, 1, 8, 64, 16, 16),
        (H100, 1, 8, 8, 8, 8),
        (H100, 1, 8, 10, 16, 16),  # rounded up behind the limit
        # Two rings a NIC; a peer of another node has two channels while 2 ranks <= 4 channels.
        (H100, 2, 8, 64, 16, 2),
        (H100, 4, 8, 64, 16, 2),  # 64 <= 64
        (H100, 8, 8, 64, 16, 1),  # 128 > 64
        (A800, 4, 8, 64, 8, 1),  # 64 > 32
        (H100, 2, 8, 4, 4, 1),  # 32 > 16
        # One rank a node: one NIC, whose rings are two where it has 25 GB/s.
        (H100, 8, 1, 64, 4, 2),  # 16 <= 16
        (H100, 9, 1, 64, 4, 1),
        (A100, 4, 1, 64, 2, 2),  # 8 <= 8
        (A800, 2, 1, 64, 2, 2),  # half a NIC is one
    ],
)
def test_channels_of_a_communicator_and_of_a_peer(
    machine: Cluster, nodes: int, ranks: int, most: int, channels: int, a_peer: int
) -> None:
    found = communicator(machine, nodes, ranks, most)
    assert found == (nodes, nodes * ranks, channels, a_peer)


@pytest.mark.parametrize(
    ("found", "sizes"),
    [
        # 32 over 8 ranks are 4, each with 64 KiB at least; doubled beyond 16 MiB a channel.
        (
            communicator(H100, 1, 8, 64),
            {1: 1, 2**16: 1, 2**17 + 1: 3, MIB: 4, 64 * MIB: 4, 64 * MIB + 1: 8}
            | {128 * MIB + 1: 16, 256 * MIB + 1: 32, 2**34: 32},
        ),
        (
            communicator(H100, 1, 8, 8),
            {MIB: 1, 16 * MIB: 1, 16 * MIB + 1: 2, 32 * MIB + 1: 4, 64 * MIB + 1: 8, 2**30: 8},
        ),
        (communicator(H100, 1, 2, 8), {2**16: 1, 2**18: 4, 64 * MIB: 4, 64 * MIB + 1: 8}),
        # Between nodes doubled beyond 128 KiB: 2 channels a peer over 8 ranks are one at first.
        (communicator(H100, 8, 1, 64), {2**17: 1, 2**17 + 1: 2, 2**30: 2}),
        (communicator(H100, 8, 8, 64), {MIB: 1, 2**30: 1}),
    ],
)
def test_channels_of_a_message(found: Communicator, sizes: dict[int, int]) -> None:
    taken = found.channels_of(np.array([*sizes]))
    assert dict(zip(sizes, taken.tolist(), strict=True)) == sizes


def test_buffers_are_a_peers_in_a_node_and_shared_between_them() -> None:
    # 4 MiB + 4.6875 + .5 and a page from a peer, a page to it: 10 and 2 in pages of 2 MiB, as the
    # log of NVIDIA/nccl#1685 has them, of 32 channels a peer on 8 H100.
    for most, channels in ((8, 8), (64, 32)):
        found = communicator(H100, 1, 8, most)
        assert found.buffers(Peers(senders=7, receivers=7)) == 7 * channels * 12 * MIB
        assert found.buffers(Peers(senders=1)) == channels * 10 * MIB
    # 16 chunks of 128 KiB a channel and way, of 16 or 4 channels; beside them a peer of the node.
    assert communicator(H100, 8, 8, 64).buffers(Peers(0, 0, 7, 7)) == 64 * MIB
    assert communicator(H100, 8, 1, 64).buffers(Peers(0, 0, 0, 1)) == 8 * MIB
    assert communicator(H100, 8, 8, 64).buffers(Peers(1, 0, 1, 0)) == 10 * MIB + 32 * MIB


@pytest.mark.parametrize(
    ("channel", "ranks", "local", "most"),
    [
        # 768 MiB at 12 a channel and peer are 64 of both: as many as NCCL has for one peer.
        (Channel.READ_WITHIN, 8, 8, 32),
        (Channel.READ_WITHIN, 72, 72, 32),
        (Channel.READ_WITHIN, 16, 8, 8),  # a flat ring over nodes
        (Channel.GRADIENT_WITHIN, 2, 8, 32),
        (Channel.GRADIENT_WITHIN, 4, 8, 16),  # 3 peers: 21
        (Channel.GRADIENT_WITHIN, 8, 8, 8),  # 7: 9
        (Channel.GRADIENT_WITHIN, 9, 72, 8),  # 8: 8, which is all of it
        (Channel.GRADIENT_WITHIN, 10, 72, 4),
        (Channel.GRADIENT_WITHIN, 33, 72, 2),
        (Channel.GRADIENT_WITHIN, 72, 72, 2),  # 1 is too few: 1.7 GiB
        (Channel.READ_ACROSS, 5, 8, 16),  # three beside the one before: 21
        (Channel.READ_ACROSS, 10, 72, 8),
        (Channel.HEADS, 8, 8, 8),
        (Channel.HEADS, 16, 8, 8),  # over two nodes
        (Channel.READ_BETWEEN, 2, 8, 8),
        (Channel.GRADIENT_BETWEEN, 32, 8, 8),
        (Channel.READ_DIRECT, 4, 8, 8),
    ],
)
def test_as_many_ctas_as_the_memory_for_all_peers_allows(
    channel: Channel, ranks: int, local: int, most: int
) -> None:
    assert max_ctas(channel, ranks, local) == most


def load(ranks: int, tokens: int = 8192, **config: object) -> Workload:
    flags = {"hybrid-layer-pattern": "*", "hidden-size": 4096, "vocab-size": 1}
    flags |= {"num-attention-heads": 32, "group-query-attention": True, "num-query-groups": 8}
    return Workload(
        model=model_of(flags),
        cluster=H100,
        gpus=ranks,
        tensor=1,
        context=ranks,
        tokens=ranks * tokens,
        config=BurstConfig(**{"head_chunks": 1, **config}),
    )


def uses(of: Workload) -> dict[Channel, Use]:
    choice, shape = timing.chosen(of.ring)
    schedules = choice.forward[0].schedule, choice.backward[0].schedule
    return dict(communicators.uses(of.ring, schedules, shape))


def test_a_double_ring_has_groups_of_nodes_and_of_places() -> None:
    found = uses(load(16, topology="double", backward="kv"))
    block = 8192 * 8 * 256 * 2
    # A block goes on to the next of the node 7 times in either node, and once to the other.
    blocks = found[Channel.READ_WITHIN]
    assert blocks.communicator == communicator(H100, 1, 8, 32) and blocks.peers == (1, 1, 0, 0)
    assert (blocks.sent, blocks.largest, blocks.at_once) == (2 * 2 * 7, block, 1)
    assert (blocks.channels, blocks.ctas, blocks.buffers) == (4, 4, 32 * 12 * MIB)  # of 32 MiB
    across = found[Channel.READ_BETWEEN]
    assert across.communicator == communicator(H100, 2, 1, 8) and across.peers == (0, 0, 1, 1)
    assert across.sent == 2 and across.buffers == 2 * 4 * 2 * MIB
    # A partial gradient of its block comes from each of the node, and goes to each.
    results = found[Channel.GRADIENT_WITHIN]
    assert results.peers == (7, 7, 0, 0) and results.communicator == communicator(H100, 1, 8, 8)


def test_what_leaves_the_node_has_a_group_of_all_ranks() -> None:
    flat = uses(load(16, topology="flat"))
    assert flat[Channel.READ_WITHIN].communicator == communicator(H100, 2, 8, 8)
    assert flat[Channel.READ_WITHIN].peers == (0, 1, 1, 0)  # the first of the other node
    heads = uses(load(16, algorithm="ulysses"))
    assert heads.keys() == {Channel.HEADS}
    use = heads[Channel.HEADS]
    assert use.communicator == communicator(H100, 2, 8, 8) and use.peers == (7, 7, 8, 8)
    assert (use.sent, use.at_once, use.ctas) == (4 * 15, 15, 8)
    sparse = replace(load(16, topology="double"), window=2 * 8192)
    direct = Direct(Tiling(sparse.ring.layout, sparse.ring.mask), sparse.ring.grid, Kind.KV)
    found = communicators.uses(sparse.ring, (direct, direct), sparse.ring.shape)
    assert found[Channel.READ_DIRECT].communicator == communicator(H100, 2, 8, 8)
    assert found[Channel.READ_ACROSS].communicator == communicator(H100, 1, 8, 8)
    assert found[Channel.READ_WITHIN].peers.senders <= 1


def reached(of: Workload, schedule: Schedule, *, backward: bool = False) -> float:
    found = communicators.reached(of.ring, schedule, of.ring.shape, backward=backward)
    return found.within_rate


def test_messages_are_no_faster_than_their_channels() -> None:
    def rate(of: Workload, **links: float) -> float:
        of = replace(of, cluster=replace(of.cluster, **links))
        return reached(of, timing.chosen(of.ring)[0].forward[0].schedule)

    # Blocks of 4, 32, 128 and 256 MiB: 4 channels of 32 up to 64 MiB, 10 are the link's 360 GB/s.
    for tokens, channels in ((1024, 4), (8192, 4), (32768, 8), (65536, 360 / 36.7)):
        assert rate(load(8, tokens, topology="flat")) == pytest.approx(channels * 36.7e9)
    assert rate(load(8, topology="flat"), channel_rate=400e9) == pytest.approx(360e9)
    assert rate(load(8, topology="flat"), nvlinks=0) == 360e9
    assert rate(load(64, topology="flat")) == pytest.approx(36.7e9)
    # Blocks of 32 MiB and as many bytes of gradients, as a kernel returns them.
    double = load(16, topology="double", backward="kv")
    schedule = timing.chosen(double.ring)[0].backward[0].schedule
    assert reached(double, schedule, backward=True) == pytest.approx(2 * 36.7e9 / (1 / 4 + 1 / 2))
    # From several ranks at once, and to seven peers at once, a channel each.
    sparse = replace(load(8), window=16384)
    direct = Direct(Tiling(sparse.ring.layout, sparse.ring.mask), sparse.ring.grid, Kind.KV)
    assert 4 * 36.7e9 < reached(sparse, direct) < 8.01 * 36.7e9
    heads = communicators.reached_by_heads(load(8, algorithm="ulysses").ring)
    assert heads.within_rate == pytest.approx(7 * 36.7e9)
    assert heads.nic_rate == 45e9


def test_buffers_are_a_part_of_memory() -> None:
    of = load(16, topology="double")
    found = memory.predict(of)
    assert found.nccl == sum(use.buffers for use in uses(of).values()) > 700 * MIB
    without = memory.predict(replace(of, cluster=replace(of.cluster, nvlinks=0)))
    assert found.total - without.total == found.nccl and without.nccl == 0
    assert memory.predict(load(1)).nccl == 0
