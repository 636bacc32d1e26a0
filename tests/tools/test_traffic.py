"""The bytes that the planner counts are those of formulas on paper, which know no plan. (fast tier)

P ranks are M nodes of L; KV, Q, dKV, dQ are the bytes of a rank's blocks and of their gradients.
"""

import pytest
import torch
from rows import attention_alone  # noqa: E402

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention.preparing import prepare
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.tools.plan import timing
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.workload import Workload
from megatron_burst.transport.comm import Communicator
from tests.plans.simulator import bytes_sent

CHAIN, HOME = True, False
GRIDS = [(1, 2), (1, 8), (2, 1), (8, 1), (2, 2), (2, 4), (3, 2), (2, 8), (4, 3), (3, 5)]
RINGS = {
    "ring flat": {"algorithm": "ring", "topology": "flat"},
    "ring double": {"algorithm": "ring", "topology": "double"},
    "allgather": {"algorithm": "allgather", "topology": "flat"},
    "burst kv flat": {"backward": "kv", "topology": "flat"},
    "burst kv double": {"backward": "kv", "topology": "double"},
    "burst query flat": {"backward": "query", "topology": "flat"},
    "burst query double": {"backward": "query", "topology": "double"},
}
DIM, TOKENS = 4, 16  # numbers of a head, tokens of a rank


def workload(nodes: int, length: int, heads: int, kv_heads: int, **config: object) -> Workload:
    rates = ("forward_rate", "backward_rate", "linear_rate", "memory_rate", "within_rate")
    cluster = Cluster(
        **dict.fromkeys((*rates, "nic_rate", "copy_rate", "peak", "memory"), 1.0),
        name="by hand",
        gpus_per_node=length,
        gpus_per_nic=1,
        contention=0.0,
    )
    sizes = heads, kv_heads, DIM
    return attention_alone(cluster, nodes * length, TOKENS, BurstConfig(**config), sizes)


def blocks(tokens: int, heads: int, kv_heads: int) -> dict[str, int]:
    """Bytes in bfloat16, of sums of gradients in float32; Q is Q and dO with two float32 a row."""
    return {
        "KV": tokens * kv_heads * 2 * DIM * 2,
        "dKV": tokens * kv_heads * 2 * DIM * 4,
        "Q": tokens * heads * (2 * DIM * 2 + 8),
        "dQ": tokens * heads * DIM * 4,
    }


def times(nodes: int, length: int, double: bool, returns: bool | None) -> tuple[int, int]:
    """How many blocks, or with `returns` gradients, leave a rank, and of them its node."""
    ranks = nodes * length
    if double:
        # A chain's last sum comes to the owner's node at another rank than the owner.
        longer = returns is CHAIN and min(nodes, length) > 1
        return ranks - 1 + longer, nodes - 1
    if returns is HOME:
        return ranks - 1, ranks - length
    return ranks - 1, ranks - 1 if nodes > 1 else 0  # by the last rank of a node


def on_paper(
    nodes: int, length: int, name: str, size: dict[str, int]
) -> tuple[list[int], list[int]]:
    """What a rank sends, and of that to other nodes, forward and backward."""
    block, gradient = ("Q", "dQ") if "query" in name else ("KV", "dKV")
    leaves_the_node = nodes > 1 and "flat" in name
    returns = HOME if "burst" in name and not leaves_the_node else CHAIN
    reads = times(nodes, length, "double" in name, None)
    returned = times(nodes, length, "double" in name, returns)
    part = size[gradient] // (1 + (returns is HOME))  # of a tile: in bfloat16
    is_summed = "double" in name and min(nodes, length) > 1  # in a node before it leaves
    away = returned[1] * (size[gradient] if is_summed else part)
    back = (returned[0] - returned[1]) * part + away, away
    backward = [read * size[block] + more for read, more in zip(reads, back, strict=True)]
    return [read * size["KV"] for read in reads], backward


def counted(load: Workload) -> tuple[list[int], list[int]]:
    forward, _, backward = timing.attention_passes(load)
    return [forward.sent, forward.between], [backward.sent, backward.between]


@pytest.mark.parametrize(("nodes", "length"), GRIDS)
@pytest.mark.parametrize("kv_heads", [24, 8, 3])
def test_what_plans_send_is_what_the_formulas_say(nodes: int, length: int, kv_heads: int) -> None:
    size = blocks(TOKENS, 24, kv_heads)
    for name, config in RINGS.items():
        load = workload(nodes, length, 24, kv_heads, **config)
        assert counted(load) == on_paper(nodes, length, name, size), name


@pytest.mark.parametrize(("nodes", "length", "size"), [(1, 4, 2), (2, 2, 2), (2, 8, 4), (3, 4, 2)])
@pytest.mark.parametrize("kv_heads", [24, 2, 1])
def test_a_hybrid_sends_what_its_rings_and_its_all_to_all_send(
    nodes: int, length: int, size: int, kv_heads: int
) -> None:
    copied = max(kv_heads, size)
    exchanged = TOKENS * (24 + copied) * 2 * DIM * 2 * (size - 1) // size
    of_ring = blocks(TOKENS * size, 24 // size, copied // size)
    for name in set(RINGS) - {"allgather"}:
        config = {**RINGS[name], "head_parallel_size": size}
        load = workload(nodes, length, 24, kv_heads, **config)
        expected = on_paper(nodes, length // size, name, of_ring)
        expected = [[each[0] + exchanged, each[1]] for each in expected]
        assert list(counted(load)) == expected, name


@pytest.mark.parametrize(
    ("nodes", "length", "kv_heads"), [(2, 4, 8), (2, 4, 2), (1, 8, 24), (4, 2, 1)]
)
def test_ulysses_exchanges_p_minus_1_of_p_parts_of_four_tensors(
    nodes: int, length: int, kv_heads: int
) -> None:
    total = TOKENS * (24 + max(kv_heads, 8)) * 2 * DIM * 2  # every rank has a kv head
    expected = [total * 7 // 8, total * (8 - length) // 8]
    load = workload(nodes, length, 24, kv_heads, algorithm="ulysses")
    assert counted(load) == (expected, expected)


@pytest.mark.parametrize("grid", [(1, 4), (2, 2)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("grad_dtype", ["model", "float32", "auto"])
def test_each_way_is_what_a_context_sends(
    grid: tuple[int, int], heads: tuple[int, int], grad_dtype: str
) -> None:
    for config in ({}, *RINGS.values()):
        load = workload(*grid, *heads, grad_dtype=grad_dtype, **config)
        settings = BurstConfig(kernel="reference", grad_dtype=grad_dtype, **config)
        channel = Communicator((), {}, 1.0)
        ring = load.ring
        context = BurstContext(
            *(settings, None, ring.grid, list(ring.nodes), channel, head_groups(ring.nodes, 1)),
            memory_limit=settings.memory_limit(ring.machine.memory),
            machine=ring.machine,
            beside=ring.beside,
        )
        q, k, v = (
            torch.zeros(1, TOKENS, count, DIM, dtype=torch.bfloat16)
            for count in (heads[0], heads[1], heads[1])
        )
        plan = prepare(context, q, k, v, Mask.causal(), 1.0).backward_plan
        assert counted(load)[1][0] == bytes_sent(plan, ring.shape.item_bytes()), config
