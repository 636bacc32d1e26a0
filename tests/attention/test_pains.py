"""What went wrong for users of other context parallelism must not go wrong here. (fast tier)

Each case is named after a report; those of sinks are in test_scores.py, those of windows, documents
and rotary positions under Megatron in tests/plugin and tests/training.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention
from tests.attention.cases import FLOAT32_TOLERANCE, Case, errors, run_cases
from tests.oracle import relative_error
from tests.plans.masks import Masking
from tests.workers import Team, WorkerPool

RINGS = [{"backward": "query"}, {"backward": "kv"}, {"algorithm": "ring"}]


def blind_rank(ranks: int) -> Masking:
    """The queries of rank 1, chunks 1 and 2P-2 of a zigzag, see nothing; their keys nobody."""
    blocks = 2 * ranks
    dark = (1, blocks - 2)
    sees = [[q not in dark and k not in dark for k in range(blocks)] for q in range(blocks)]
    return Masking(table=tuple(map(tuple, sees)))


PAINS: dict[str, dict[str, Any]] = {
    "mc 1764, a rank whose tokens are all masked": {"chunk": 4, "masking": blind_rank(4)},
    "te 2186, short documents and padding": {
        "chunk": 6,
        "masking": Masking(documents=(*range(10), 11, 23, 24, 48)),  # many of one token
    },
    "ring-flash-attention, in float64": {"chunk": 8, "dim": 8, "dtype": torch.float64},
}
LIMITS = {torch.float32: FLOAT32_TOLERANCE, torch.float64: 1e-14}


@pytest.mark.parametrize("pain", PAINS)
def test_it_is_the_dense_oracle(workers: WorkerPool, pain: str) -> None:
    """In the dtype of the tensors, without a NaN, and of what sees nothing all is zero."""
    cases = [Case(config=config, **PAINS[pain]) for config in RINGS]
    for case, answer in zip(cases, run_cases(workers, 4, cases), strict=True):
        assert {x.dtype for x in answer.found[2:5]} == {case.dtype}
        assert max(errors(answer.found, case.expected(4)).values()) < LIMITS[case.dtype]
        out, _, *gradients = answer.replies[1].results
        assert not pain.startswith("mc 1764") or not any(x.any() for x in (out, *gradients))


def two_calls(team: Team, config: dict[str, str]) -> list[Tensor]:
    """Two calls with other tensors of the same shapes, then their backwards, the last one first."""
    context = team.context(BurstConfig(**config))
    graphs = []
    for seed in (0, 1):
        q, k, v, dout = (context.shard(x, dim=1) for x in Case(seed=seed).inputs(context.ranks))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        graphs.append((ring_attention(q, k, v, context, mask=Mask.causal()), leaves, dout))
    gradients = [torch.autograd.grad(*graph) for graph in reversed(graphs)]
    whole = [context.unshard(x, dim=1) for g in reversed(gradients) for x in g]
    return [context.unshard(out, dim=1) for out, _, _ in graphs] + whole


@pytest.mark.parametrize("config", RINGS, ids=str)
def test_automodel_3157_a_call_does_not_reuse_the_tensors_of_another(
    workers: WorkerPool, config: dict[str, str]
) -> None:
    found = workers.run(4, two_calls, config)[0]
    first, second = (Case(seed=seed).expected(4) for seed in (0, 1))
    gradients = [x for r in (first, second) for x in (r.dq, r.dk, r.dv)]
    wanted = [first.out, second.out, *gradients]
    for x, expected in zip(found, wanted, strict=True):
        assert relative_error(x, expected) < FLOAT32_TOLERANCE


def beside_a_default_device(team: Team, case: Case) -> list[Tensor]:
    """As after `torch.set_default_device("cuda")`, which a tensor on the host must not follow."""
    whole = case.inputs(4)
    with torch.device("meta"):
        context = team.context(BurstConfig(**case.config))
        *leaves, dout = (context.shard(x, dim=1) for x in whole)
        out = ring_attention(*(x.requires_grad_() for x in leaves), context, mask=case.mask)
        gradients = torch.autograd.grad(out, leaves, dout)
    return [context.unshard(x, dim=1) for x in (out, *gradients)]


def test_torchs_default_device_is_only_that(workers: WorkerPool) -> None:
    case = Case(chunk=6, masking=Masking(True, 7, (*range(10), 11, 23, 24, 48)))
    found, expected = workers.run(4, beside_a_default_device, case)[0], case.expected(4)
    wanted = expected.out, expected.dq, expected.dk, expected.dv
    assert all(
        relative_error(*pair) < FLOAT32_TOLERANCE for pair in zip(found, wanted, strict=True)
    )


def test_a_module_is_copied_without_its_context() -> None:
    """As for an average of weights, or for a policy that stays as it was."""
    module = torch.nn.Linear(2, 2)
    module.context = BurstContext.create(BurstConfig())  # type: ignore[assignment]
    assert copy.deepcopy(module).context is module.context


def gradients_of_some(team: Team, wanted: str) -> bool:
    context = team.context(BurstConfig())
    q, k, v, dout = (context.shard(x, dim=1) for x in Case().inputs(context.ranks))
    tensors = {"q": q, "k": k, "v": v}
    for name in wanted:
        tensors[name].requires_grad_()
    ring_attention(q, k, v, context, mask=Mask.causal()).backward(dout)
    return all((x.grad is not None) == (name in wanted) for name, x in tensors.items())


@pytest.mark.parametrize("wanted", ["q", "k", "kv", "qkv"])
def test_long_context_attention_149_backward_returns_a_gradient_for_each_input(
    workers: WorkerPool, wanted: str
) -> None:
    assert all(workers.run(2, gradients_of_some, wanted))
