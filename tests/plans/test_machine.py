"""The rates by which plans are chosen are those of configs/. (fast tier)"""

from dataclasses import fields, replace

import pytest

from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.choice.machine import MACHINES, Machine
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.schedules.plan import Kind
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid
from megatron_burst.plans.visibility.layout import zigzag
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.tools.plan.configs import Configs


def test_all_gpus_of_the_planner_are_known() -> None:
    gpus = {table.get("gpu") for table in Configs.read().clusters.values()} - {None}
    assert gpus == {*MACHINES}
    found = [next(word for word in MACHINES if word in f"NVIDIA {gpu}") for gpu in sorted(gpus)]
    assert found == sorted(gpus), "GB200 is no B200"


@pytest.mark.parametrize("name", MACHINES)
def test_they_are_the_planners(name: str) -> None:
    cluster = Configs.read().cluster(name.lower())
    for rate in fields(Machine):
        expected = getattr(cluster, rate.name)
        assert getattr(MACHINES[name], rate.name) == pytest.approx(expected, rel=1e-6), rate.name


def slowest(machine: Machine, beside: int, nodes: str = "aaaabbbb") -> float:
    """Seconds of the slowest message of a flat ring."""
    tiling = Tiling(zigzag(16 * len(nodes), len(nodes)), Mask.full())
    ring = Ring(tiling, Grid((tuple(range(len(nodes))),)), Kind.KV)
    shape = Shape(16, 4, 4, 8, 8, 2, 4)
    links = Links.of(nodes, shape, replace(machine, nic_latency=0.0, within_latency=0.0), beside)
    (timed,) = links.timed(ring.messages(backward=False), shape.item_bytes(), 16)
    return float(timed.seconds.max())


@pytest.mark.parametrize("gpus_per_nic", [1, 2, 4, 8])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_ranks_of_a_row_share_their_nics_as_if_each_were_told_so(
    gpus_per_nic: int, tensor: int
) -> None:
    machine = replace(MACHINES["A800"], gpus_per_nic=gpus_per_nic)
    for heads in (1, 2):
        one, other = slowest(machine, tensor * heads), slowest(machine.shared_by(tensor), heads)
        assert one == pytest.approx(other)
    if gpus_per_nic == 8:
        alone = slowest(machine, 1)
        assert slowest(machine.shared_by(tensor), 1) == pytest.approx(tensor * alone)


def test_ranks_that_alternate_between_nodes_have_nics_of_their_own() -> None:
    machine = replace(MACHINES["A800"], gpus_per_nic=1)
    assert slowest(machine, 1, "abab") == slowest(machine, 1, "abcd")
    assert slowest(replace(machine, gpus_per_nic=2), 1, "abab") == 2 * slowest(machine, 1, "abab")
