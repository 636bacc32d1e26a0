"""Hooks of a model's calls see its forward and its schedule plans alike. (fast tier)

tests/training/test_schedule_plans.py runs Megatron's own plans.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core.pipeline_parallel.utils")
from megatron.core.pipeline_parallel.utils import NoopScheduleNode  # noqa: E402

from megatron_burst.plugin.calls import after_calls, before_calls  # noqa: E402

NOTHING = NoopScheduleNode()


NODES = "pre_process", "mlp", "moe_combine", "mtp_post_process", "post_process"  # in their order


class Model(torch.nn.Module):
    """Its plan has as many of the nodes as are asked for."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = nodes

    def forward(self, x: int, scale: int = 1) -> int:
        return x * scale

    def build_schedule_plan(self, x: int, scale: int = 1) -> Any:
        made = {name: SimpleNamespace(forward_func=lambda: x * scale) for name in NODES}
        for name in NODES[self.nodes :]:
            made[name] = None if name == "post_process" else NOTHING
        return SimpleNamespace(
            pre_process=made["pre_process"],
            post_process=made["post_process"],
            num_layers=lambda: int(self.nodes > 1),
            get_layer=lambda number: SimpleNamespace(**made),
            made=made,
        )


def hooked(model: Model, seen: list[Any]) -> Model:
    before_calls(model, lambda _, given: {**given, "x": given["x"] + 1})
    before_calls(model, lambda _, given: seen.append((given,)))
    after_calls(model, lambda _, given, output: output + 10 * given["x"])
    after_calls(model, lambda *given: seen.append(given[1:]), always_call=True)
    return model


@pytest.mark.parametrize("nodes", range(1, 1 + len(NODES)))
def test_hooks_see_a_plan_as_they_see_a_forward(nodes: int) -> None:
    seen_in_forward: list[Any] = []
    seen_in_plan: list[Any] = []
    expected = hooked(Model(nodes), seen_in_forward)(1, scale=3)
    plan = hooked(Model(nodes), seen_in_plan).build_schedule_plan(1, scale=3)
    assert seen_in_plan == seen_in_forward[:1], "the end of the call comes with the last node"
    outputs = [plan.made[name].forward_func() for name in NODES[:nodes]]
    assert outputs == [6] * (nodes - 1) + [expected] and expected == 26
    assert seen_in_plan == seen_in_forward == [({"x": 2, "scale": 3},), ({"x": 2, "scale": 3}, 26)]


def test_a_model_without_plans_has_its_forward_alone() -> None:
    model, seen = torch.nn.Identity(), []
    before_calls(model, lambda *_: seen.append("before"))
    after_calls(model, lambda *_: seen.append("after"))
    model(1)
    assert seen == ["before", "after"] and not hasattr(model, "build_schedule_plan")
