"""The rates by which plans are chosen are those of configs/. (fast tier)"""

from dataclasses import fields

import pytest

from megatron_burst.plans.choice.machine import MACHINES, Machine
from megatron_burst.tools.plan.configs import Configs


@pytest.mark.parametrize("name", MACHINES)
def test_they_are_the_planners(name: str) -> None:
    cluster = Configs.read().cluster(name.lower())
    for rate in fields(Machine):
        expected = getattr(cluster, rate.name)
        assert getattr(MACHINES[name], rate.name) == pytest.approx(expected, rel=1e-6), rate.name
