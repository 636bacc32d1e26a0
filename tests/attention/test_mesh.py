"""Attention by a mesh against the float64 dense oracle, its bytes and its log. (fast tier)"""

import itertools
from typing import Any

import pytest
import torch

from megatron_burst.attention.sums import PartialOutputs
from megatron_burst.plans.schedules.mesh import Mesh
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.plans.visibility.interval import Interval
from tests.attention.cases import (
    HEADS,
    LAYOUT_NAMES,
    Case,
    check,
    errors,
    lines_of_plans,
    run_cases,
)
from tests.attention.test_recompute import twice
from tests.attention.test_sums import hand_on
from tests.plans.masks import Masking, hard_maskings
from tests.tier import slow_if, some
from tests.workers import WorkerPool

# Ranks, and how many of them a node has.
PLACES = [(4, 4), (4, 1), (6, 6), (6, 1), (8, 8), (8, 1), (8, 2)]
EVERY = [*itertools.product(PLACES, ("kv", "query"))]
FAST = [((4, 4), "query"), ((4, 1), "kv")]
BFLOAT16_OVER_FLASH = 1.5


def setting(per_node: int, backward: str, **more: Any) -> dict[str, Any]:
    return {"topology": "mesh", "ranks_per_node": per_node, "backward": backward, **more}


@pytest.mark.parametrize("case", slow_if({*EVERY} - {*FAST}, EVERY), ids=str)
def test_float32_equals_the_dense_oracle_and_bytes_the_plans_of_meshes(
    workers: WorkerPool, case: tuple[tuple[int, int], str]
) -> None:
    (ranks, per_node), backward = case
    config = setting(per_node, backward)
    shapes: list[dict[str, Any]] = [
        {"batch": 2, "chunk": 1, "dim": 5},
        {"chunk": 13, "dim": 16, "value_dim": 7},
    ]
    turns = zip(itertools.cycle(shapes), HEADS.values(), (True, False, True), strict=False)
    cases = [Case(config=config, heads=h, masking=Masking(c), **shape) for shape, h, c in turns]
    hard = some([*hard_maskings(ranks, 6).values()], 7, ranks % 7)
    cases += [
        Case(config=config | {"layout": layout}, chunk=6, masking=masking, heads=(4, 2), dim=3)
        for masking, layout in zip(hard, itertools.cycle(LAYOUT_NAMES), strict=False)
    ]
    capped: dict[str, Any] = {"has_sink": True, "soft_cap": 3.0, "masking": Masking(window=5)}
    cases += [Case(config=config | {"kernel": "reference"}, chunk=4, **capped)]
    for each, answer in zip(cases, check(cases, ranks, workers), strict=True):
        choice = each.choice(ranks)
        taken = choice.forward[0].schedule, choice.backward[0].schedule
        assert all(isinstance(schedule, Mesh) for schedule in taken)
        assert [reply.sent for reply in answer.replies] == each.planned_bytes(ranks), each


def test_head_parallelism_inside(workers: WorkerPool) -> None:
    config = setting(2, "auto", head_parallel_size=2)
    cases = [Case(config=config, heads=heads) for heads in ((8, 8), (4, 2), (4, 1))]
    cases += [Case(config=config | {"ranks_per_node": 8}, has_sink=True)]
    check(cases, 8, workers)


@pytest.mark.parametrize("fraction", slow_if([0.0, 1.0], [0.0, 0.5, 1.0]))
def test_a_second_pass_of_early_rows(workers: WorkerPool, fraction: float) -> None:
    for per_node, ranks in ((4, 4), (2, 8)):
        config = setting(per_node, "auto")
        for reply in workers.run(ranks, twice, config, "causal", fraction, True):
            assert reply["apart"] < 2e-6


@pytest.mark.parametrize("backward", slow_if(["kv"], ["kv", "query"]))
def test_bfloat16_is_nearly_as_exact_as_one_call_of_flash_attention(
    workers: WorkerPool, backward: str
) -> None:
    heads = (HEADS["mha"], HEADS["gqa 4:1"])
    shape: dict[str, Any] = {"chunk": 32, "dim": 32, "dtype": torch.bfloat16}
    for ranks, per_node in ((4, 4), (8, 2)):
        cases = [Case(config=setting(per_node, backward), heads=h, **shape) for h in heads]
        for case, answer in zip(cases, run_cases(workers, ranks, cases), strict=True):
            exact = case.expected(ranks)
            allowed = errors(case.one_kernel_call(ranks, "cpu"), exact)
            for name, found in errors(answer.found, exact).items():
                limit = max(BFLOAT16_OVER_FLASH * allowed[name], 1e-6)
                assert found <= limit, (ranks, name, found, allowed[name])


def test_auto_takes_it_and_the_log_says_what_the_next_best_would_cost(workers: WorkerPool) -> None:
    case = Case(config={"ranks_per_node": 1}, heads=(16, 16), chunk=256, dim=64)
    (line,), *_ = workers.run(4, lines_of_plans, case)
    forward, backward = case.choice(4).forward, case.choice(4).backward
    assert f"forward {forward[0]} ({forward[1]})" in line
    assert f"backward {backward[0]} ({backward[1]})" in line
    assert "the 2 x 2 kv mesh" in str(forward[0]) and "the 2 x 2 kv mesh" in str(backward[0])


def test_memory_that_is_too_small_leaves_a_ring(workers: WorkerPool) -> None:
    case = Case(config={"ranks_per_node": 1, "memory_mb": 1}, heads=(16, 16), chunk=256, dim=64)
    (line,), *_ = workers.run(4, lines_of_plans, case)
    assert "forward the kv ring" in line and "mesh" not in line


def test_an_output_that_was_handed_on_starts_anew() -> None:
    outputs, item = PartialOutputs(0, torch.zeros(1, 2, 1, 4), 4), Item(Kind.OUTPUT, 1)
    for value in (1.0, 2.0):
        partial = torch.full((1, 2, 1, 4), value), torch.zeros(1, 1, 2)
        outputs.add(item, Interval(0, 2), partial)
        handed = hand_on(outputs, item)
        assert all(map(torch.equal, handed, partial))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_output_of_some_rows_is_handed_on_with_nothing_in_the_others(dtype: torch.dtype) -> None:
    outputs, item = PartialOutputs(0, torch.empty(1, 9, 2, 4, dtype=dtype), 4), Item(Kind.OUTPUT, 1)
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(1, 4, 2, 4, generator=generator).to(dtype)
    part_lse = torch.randn(1, 2, 4, generator=generator)
    outputs.add(item, Interval(3, 7), (part, part_lse))
    out, lse = hand_on(outputs, item)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out[:, 3:7], part) and torch.equal(lse[:, :, 3:7], part_lse)
    assert not out[:, :3].any() and not out[:, 7:].any()
    assert lse[:, :, :3].isneginf().all() and lse[:, :, 7:].isneginf().all()
