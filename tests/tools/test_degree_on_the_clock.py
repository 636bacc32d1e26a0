"""What burst takes by default, on the planner's clock: beside every forced setting, and the time
that it takes to choose. (fast tier; most places slow)"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from rows import attention_alone  # noqa: E402

from megatron_burst import BurstConfig
from megatron_burst.plans.choice.degree import choose_degree
from megatron_burst.tools.plan.cluster import Cluster
from megatron_burst.tools.plan.configs import Configs
from megatron_burst.tools.plan.timing import attention_passes
from megatron_burst.tools.plan.workload import Workload
from tests.tier import slow_if, some

CONFIGS = Configs.read()
H100, A100 = (CONFIGS.cluster(name) for name in ("h100", "a100"))
CLUSTERS = {
    "A800": CONFIGS.cluster("a800"),
    "H100": H100,
    "H100, 25 Gbit/s": replace(H100, nic_rate=H100.nic_rate / 16),
    # Links within a node that are slow, and a NIC of 25 Gbit/s for a node.
    "H100 at 60 GB/s": replace(H100, within_rate=60e9),
    "A100 over PCIe": replace(A100, within_rate=25e9),
    "H100 over Ethernet": replace(H100, nic_rate=25e9 / 8, gpus_per_nic=8),
}
HEADS = ((32, 32), (32, 8), (32, 4), (8, 1))  # of a rank
TOKENS = (1024, 4096, 16384, 65536)
PLACES = ((2, 2), (8, 8), (4, 2), (8, 1), (32, 8), (64, 8))
FAST = {("H100", (8, 8)), ("A100 over PCIe", (4, 2)), ("H100, 25 Gbit/s", (8, 1))}
NEAR = 1.02
FLAT = {"H100 over Ethernet": 1.1}
"""Where a node has one NIC, a flat ring, which leaves it once, may be faster than a double one."""
SLOW = {case for case in product(CLUSTERS, PLACES) if case not in FAST}


def forced() -> Iterator[dict[str, Any]]:
    for degree, topology, backward in product(
        (1, 2, 4, 8, 16, 32), ("auto", "flat", "double", "mesh"), ("auto", "kv", "query")
    ):
        yield {"head_parallel_size": degree, "topology": topology, "backward": backward}
    yield from ({"algorithm": name} for name in ("ring", "ulysses", "allgather"))


def seconds(load: Workload, **settings: Any) -> float | None:
    """Of a forward and a backward; None where it is not possible."""
    try:
        passes = attention_passes(replace(load, config=BurstConfig(head_chunks=1, **settings)))
    except ValueError:
        return None
    return sum(each.seconds for each in passes)


def load_of(cluster: Cluster, place: tuple[int, int], heads: tuple[int, int], n: int) -> Workload:
    ranks, on_a_node = place
    a_nic = min(cluster.gpus_per_nic, on_a_node)
    machine = replace(cluster, gpus_per_node=on_a_node, gpus_per_nic=a_nic)
    return attention_alone(machine, ranks, n, BurstConfig(head_chunks=1), (*heads, 128))


@pytest.mark.parametrize("case", slow_if(SLOW, product(CLUSTERS, PLACES)), ids=str)
def test_the_default_is_at_most_2_percent_behind_every_forced_setting(
    case: tuple[str, tuple[int, int]],
) -> None:
    name, place = case
    nodes = [rank // place[1] for rank in range(place[0])]
    for heads, tokens in some([*product(HEADS, TOKENS)], 3, place[1] % 3):
        load = load_of(CLUSTERS[name], place, heads, tokens)
        limit = load.config.memory_limit(load.cluster.memory)
        size, why = choose_degree(load.config, nodes, load.ring.shape, limit, load.cluster)
        taken = seconds(load, head_parallel_size=size)
        best = min(
            (time, str(way)) for way in forced() if (time := seconds(load, **way)) is not None
        )
        assert taken and taken <= FLAT.get(name, NEAR) * best[0], (
            f"{heads}, {tokens}: {why}; {taken}, {best}"
        )
