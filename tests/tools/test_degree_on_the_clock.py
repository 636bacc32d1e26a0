"""The Ulysses degree that bytes choose, on the planner's clock. (fast tier; most places slow)"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from megatron_burst import BurstConfig
from megatron_burst.plans.degree import choose_degree
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.timing import attention_passes
from tests.tier import slow_if

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "docs"))
from rows import attention_alone  # noqa: E402

CONFIGS = Configs.read()
H100, A100, A800 = (CONFIGS.cluster(name) for name in ("h100", "a100", "a800"))
CLUSTERS = {
    "A800": A800,
    "H100": H100,
    # Links within a node that are slow and slower, and a NIC of 25 Gbit/s for a node.
    "H100 at 60 GB/s": replace(H100, within_rate=60e9),
    "A100 over PCIe": replace(A100, within_rate=25e9),
    "A100 over half of it": replace(A100, within_rate=10e9),
    "H100 over Ethernet": replace(H100, nic_rate=25e9 / 8, gpus_per_nic=8),
}
LONG = {"A100 over PCIe": 1.1, "A100 over half of it": 1.2, "H100 over Ethernet": 1.45}
HEADS = ((32, 32), (32, 8), (32, 4))  # of a rank
TOKENS = (1024, 4096, 16384, 65536)
PLACES = ((2, 2), (4, 4), (8, 8), (4, 2), (8, 4), (16, 8), (32, 4), (64, 8), (256, 8))
FAST = {("H100", (8, 8)), ("A100 over PCIe", (4, 4)), ("A800", (16, 8))}


def by_degree(
    cluster: Cluster, place: tuple[int, int], heads: tuple[int, int], tokens: int
) -> tuple[dict[int, float], int]:
    """Return the seconds of a layer's attention with every degree, and the chosen one."""
    ranks, on_a_node = place
    a_nic = min(cluster.gpus_per_nic, on_a_node)
    machine = replace(cluster, gpus_per_node=on_a_node, gpus_per_nic=a_nic)
    config = BurstConfig(head_parallel_size=None, head_chunks=1)
    load = attention_alone(machine, ranks, tokens, config, (*heads, 128))
    nodes = [rank // on_a_node for rank in range(ranks)]
    sizes = [u for u in (1, 2, 4, 8) if on_a_node % u == 0 and heads[1] % u == 0]
    found = {}
    for size in sizes:
        passes = attention_passes(replace(load, config=BurstConfig(head_parallel_size=size)))
        found[size] = sum(each.seconds for each in passes)
    return found, choose_degree(load.config, nodes, load.ring.shape)[0]


SLOW = {case for case in product(CLUSTERS, PLACES) if case not in FAST}


@pytest.mark.parametrize("case", slow_if(SLOW, product(CLUSTERS, PLACES)), ids=str)
def test_it_is_never_slower_than_none_and_near_the_best(case: tuple[str, tuple[int, int]]) -> None:
    """On 16 ranks or more within 3 %; on few it may stay with none where another is faster.

    So it does with long shards, where it saves memory and loses up to 5 %, over slow links more.

    On less than 8 it may be slower than none by 7 %, where links are slow and messages nearly hide.
    """
    name, place = case
    for heads, tokens in product(HEADS, TOKENS if place[0] < 256 else TOKENS[:2]):
        seconds, chosen = by_degree(CLUSTERS[name], place, heads, tokens)
        told = f"{heads}, {tokens} tokens: {chosen} of {seconds}"
        assert seconds[chosen] <= (1.03 if place[0] >= 8 else 1.07) * seconds[1], told
        if place[0] >= 16:
            more = 1.03 if tokens < 65536 else LONG.get(name, 1.05)
            assert seconds[chosen] <= more * min(seconds.values()), told
