"""Sinks, soft caps and heads of two sizes on every ring against the dense oracle. (fast tier)"""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from tests.attention.cases import (
    LAYOUT_NAMES,
    Case,
    answer,
    check,
    logged,
    run_cases,
    variants,
)
from tests.plans.masks import Masking, hard_maskings, maskings
from tests.tier import examples, some
from tests.workers import Team, WorkerPool

VARIANTS = [
    *variants(["flat"]),
    *({"backward": b, "topology": "double", "ranks_per_node": 2} for b in ("kv", "query")),
    {"head_parallel_size": 2},
]
SINK, CAP = {"has_sink": True}, {"soft_cap": 1.3}
SCORES: dict[str, dict[str, Any]] = {
    "a sink": SINK,
    "larger keys": {"dim": 10, "value_dim": 6},
    "larger values": {"dim": 4, "value_dim": 9},
    "a sink and larger keys": {**SINK, "dim": 10, "value_dim": 6},
    "a soft cap": CAP,
    "a negative scale": {**SINK, "scale": -0.4},
    "a scale of 0 and a soft cap": {**CAP, "scale": 0.0},
    "a soft cap, a sink and larger values": {**CAP, **SINK, "dim": 4, "value_dim": 9},
}


def case_of(config: dict[str, Any], scores: dict[str, Any], **more: Any) -> Case:
    if "soft_cap" in scores:
        config = {**config, "kernel": "reference"}
    return Case(config=config, **{"heads": (8, 4), **scores, **more})


@pytest.mark.parametrize("config", VARIANTS, ids=str)
def test_every_ring_equals_the_oracle(workers: WorkerPool, config: dict[str, Any]) -> None:
    masks = hard_maskings(4, 4)
    names = ("window of a chunk", "documents that end one off", "blocks", "everything at once")
    chosen = [Masking(), *(masks[name] for name in names), Masking(False)]
    turn = VARIANTS.index(config)  # other pairs of scores and masks on every ring
    cases = [
        case_of(config, scores, chunk=4, masking=chosen[(number + turn) % len(chosen)])
        for number, scores in enumerate(SCORES.values())
    ]
    check(some(cases, 3, turn // 2 % 3), 4, workers)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_hard_masks_equal_the_oracle(workers: WorkerPool, ranks: int) -> None:
    scores, layouts = itertools.cycle(SCORES.values()), itertools.cycle(LAYOUT_NAMES)
    cases = [
        case_of({"layout": next(layouts)}, next(scores), chunk=6, masking=masking)
        for masking in hard_maskings(ranks, 6).values()
    ]
    check(some(cases, 3, ranks % 3), ranks, workers)


@examples(25)
@given(
    ranks=st.integers(1, 8),
    chunk=st.integers(1, 3),
    config=st.sampled_from([c for c in VARIANTS if "ranks_per_node" not in c]),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1)]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    soft_cap=st.none() | st.floats(0.1, 50),
    has_sink=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_scores_equal_the_oracle(
    workers: WorkerPool,
    ranks: int,
    chunk: int,
    config: dict[str, Any],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    soft_cap: float | None,
    has_sink: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    if ranks % config.get("head_parallel_size", 1):
        config = {}
    spread = ranks if config.get("algorithm") == "ulysses" else config.get("head_parallel_size", 1)
    config = {**config, "kernel": "auto" if soft_cap is None else "reference"}
    case = Case(
        config=config,
        chunk=2 * chunk,
        heads=(spread * heads[0], spread * heads[1]),
        dim=sizes[0],
        value_dim=sizes[1],
        masking=data.draw(maskings(4 * ranks * chunk)),
        soft_cap=soft_cap,
        has_sink=has_sink,
        seed=seed,
    )
    check([case], ranks, workers)


NOTHING = Masking(False, table=((False,) * 4,) * 4)


@pytest.mark.parametrize("config", [{"backward": "kv"}, {"backward": "query"}, VARIANTS[-1]])
def test_a_row_that_sees_nothing_sees_its_sink(workers: WorkerPool, config: dict[str, Any]) -> None:
    case = Case(config=config, chunk=4, masking=NOTHING, has_sink=True)
    (found,) = run_cases(workers, 2, [case])
    sink = case.sink()
    assert sink is not None
    assert torch.equal(found.found.lse, sink[:, None].expand_as(found.found.lse))
    assert not any(x.any() for x in (found.found.out, *found.found[2:]))


def test_attention_gym_200_the_lse_is_natural() -> None:
    # One key: its score is the log-sum-exp, in the natural logarithm and in no other.
    context = BurstContext.create(BurstConfig())
    q, k = torch.full((1, 2, 1, 4), 3.0), torch.full((1, 2, 1, 4), 0.5)
    mask = Mask.causal(window=0)
    out, lse = ring_attention(q, k, k, context, mask=mask, return_lse=True)
    torch.testing.assert_close(lse, torch.full((1, 1, 2), 3.0))
    sink = torch.tensor([3.0])
    out, lse = ring_attention(q, k, k, context, mask=mask, sink=sink, return_lse=True)
    torch.testing.assert_close(lse, torch.full((1, 1, 2), 3.0 + math.log(2)))
    torch.testing.assert_close(out, k / 2)


def attend(sink: Tensor | None) -> tuple[Tensor, ...]:
    context = BurstContext.create(BurstConfig())
    q, k, v, dout = (
        torch.randn(2, 8, 4, 6, generator=torch.Generator().manual_seed(i)) for i in range(4)
    )
    q.requires_grad_()
    out, lse = ring_attention(q, k, v, context, mask=Mask.causal(), sink=sink, return_lse=True)
    out.backward(dout)
    assert q.grad is not None
    return out.detach(), lse, q.grad


def test_a_sink_of_minus_inf_is_none() -> None:
    sink = torch.full((4,), -math.inf, requires_grad=True)
    for found, expected in zip(attend(sink), attend(None), strict=True):
        torch.testing.assert_close(found, expected)
    assert sink.grad is not None and not sink.grad.any()


def test_a_row_that_sees_nothing_not_even_a_sink() -> None:
    context = BurstContext.create(BurstConfig())
    x, sink = torch.ones(1, 4, 2, 6, requires_grad=True), torch.tensor([-math.inf, 0.5])
    sink.requires_grad_()
    mask = NOTHING.mask
    out, lse = ring_attention(x, x, x, context, mask=mask, sink=sink, return_lse=True)
    out.backward(torch.ones_like(out))
    assert not out.any() and lse[:, 0].isneginf().all() and (lse[:, 1] == 0.5).all()
    assert x.grad is not None and not x.grad.any()
    assert sink.grad is not None and not sink.grad.any()


def test_off_by_one_is_a_sink_of_zeros_without_gradient() -> None:
    zeros = torch.zeros(4)
    found = attend(zeros)
    assert zeros.grad is None
    assert (found[1] > attend(None)[1]).all() and found[0].norm() < attend(None)[0].norm()


def test_the_gradient_has_the_dtype_of_the_sink() -> None:
    exact = torch.tensor([-1.0, 0.5, 2.0, 4.0], requires_grad=True)
    rounded = exact.detach().bfloat16().requires_grad_()
    attend(exact)
    attend(rounded)
    assert exact.grad is not None and rounded.grad is not None
    assert rounded.grad.dtype == torch.bfloat16
    assert torch.equal(rounded.grad, exact.grad.bfloat16())


@pytest.mark.parametrize("backward", ["kv", "query"])
@pytest.mark.parametrize("sizes", [(10, 6), (6, 10)])
def test_what_is_sent_is_not_padded(
    workers: WorkerPool, backward: str, sizes: tuple[int, int]
) -> None:
    dim, value_dim = sizes
    case = Case(config={"backward": backward}, chunk=6, dim=dim, value_dim=value_dim)
    (found,) = run_cases(workers, 4, [case])
    assert [reply.sent for reply in found.replies] == case.planned_bytes(4)


def attend_deterministically(team: Team, case: Case) -> list[Tensor]:
    torch.use_deterministic_algorithms(True)
    try:
        (reply,) = answer(team, [case])
    finally:
        torch.use_deterministic_algorithms(False)
    return [*reply.results, reply.dsink]


@pytest.mark.parametrize("backward", ["kv", "query"])
def test_every_step_serves_deterministic_mode(workers: WorkerPool, backward: str) -> None:
    # Where something has no deterministic way, torch raises an error.
    config = {"backward": backward, "layout": "striped"}
    masking = Masking(window=5, documents=(0, 9, 32))
    case = Case(config=config, chunk=8, has_sink=True, value_dim=9, masking=masking)
    first, second = (workers.run(2, attend_deterministically, case) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_log_says_when_heads_are_padded() -> None:
    context = BurstContext.create(BurstConfig())
    q, v = torch.zeros(1, 4, 2, 12), torch.zeros(1, 4, 2, 8)
    with logged() as lines:
        ring_attention(q, q, v, context, mask=Mask.causal())
    assert "kernel cpu with heads padded to 12 (not cpu: " in lines[0], "nothing of GPUs' kernels"
    assert "not cpu: head sizes of K and V differ (12 and 8)" in lines[0]
