"""What went wrong for users of other context parallelism must not go wrong here. (fast tier)

Each test is named after a report; those of sinks are in test_scores.py, those of windows, documents
and rotary positions under Megatron in tests/plugin and tests/training.
"""

import re

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig, Mask, ring_attention
from tests.attention.cases import FLOAT32_TOLERANCE, Case, errors, run_cases
from tests.oracle import relative_error
from tests.plans.masks import Masking
from tests.workers import Team, WorkerPool

RINGS = [{"backward": "query"}, {"backward": "kv"}, {"algorithm": "ring"}]


def blind_rank(ranks: int) -> Masking:
    """The queries of rank 1, chunks 1 and 2P-2 of a zigzag, see nothing; their keys nobody."""
    blocks = 2 * ranks
    dark = (1, blocks - 2)
    return Masking(
        table=tuple(
            tuple(q not in dark and k not in dark for k in range(blocks)) for q in range(blocks)
        )
    )


@pytest.mark.parametrize("config", RINGS, ids=str)
def test_mc_1764_a_rank_whose_tokens_are_all_masked_has_zeros_and_no_nan(
    workers: WorkerPool, config: dict[str, str]
) -> None:
    case = Case(config=config, chunk=4, masking=blind_rank(4))
    (answer,) = run_cases(workers, 4, [case])
    out, _, dq, dk, dv = answer.replies[1].results
    assert all(not x.any() for x in (out, dq, dk, dv))
    assert max(errors(answer.found, case.expected(4)).values()) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("config", RINGS, ids=str)
def test_te_2186_short_documents_and_padding_leave_gradients_small(
    workers: WorkerPool, config: dict[str, str]
) -> None:
    tokens = 48
    bounds = (*range(10), 11, 23, 24, tokens)  # many of one token, half of the last is "padding"
    case = Case(config=config, chunk=6, masking=Masking(documents=bounds), seed=3)
    (answer,) = run_cases(workers, 4, [case])
    expected = case.expected(4)
    for name in ("dk", "dv"):
        found = getattr(answer.found, name)
        assert found.isfinite().all()
        assert found.abs().max() <= getattr(expected, name).abs().max() * 1.001
    assert max(errors(answer.found, expected).values()) < FLOAT32_TOLERANCE


def depends_on_the_first_token(team: Team) -> float:
    context = team.context(BurstConfig())
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 8 * context.ranks, 2, 8, generator=generator)
    outs = []
    for value in (0.0, 5.0):
        whole[:, 0] = value
        x = context.shard(whole, dim=1)
        outs.append(ring_attention(x, x, x, context, mask=Mask.causal()))
    return (outs[0] - outs[1]).abs().amax(dim=(0, 2, 3)).min().item()


def test_automodel_2918_every_rank_sees_the_tokens_of_the_others(workers: WorkerPool) -> None:
    assert all(change > 0 for change in workers.run(4, depends_on_the_first_token))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", RINGS, ids=str)
def test_ring_flash_attention_sums_of_gradients_are_no_aliases_and_keep_their_dtype(
    workers: WorkerPool, config: dict[str, str], dtype: torch.dtype
) -> None:
    limit = {torch.float32: FLOAT32_TOLERANCE, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype]
    case = Case(config=config, heads=(4, 2), dtype=dtype, chunk=8, dim=8)
    (answer,) = run_cases(workers, 4, [case])
    assert {x.dtype for x in (answer.found.dq, answer.found.dk, answer.found.dv)} == {dtype}
    assert max(errors(answer.found, case.expected(4)).values()) < limit


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


@pytest.mark.parametrize("config", RINGS, ids=str)
def test_torch_141429_a_balanced_layout_without_causality(
    workers: WorkerPool, config: dict[str, str]
) -> None:
    case = Case(config=config, masking=Masking(False), heads=(6, 3))
    (answer,) = run_cases(workers, 3, [case])
    assert max(errors(answer.found, case.expected(3)).values()) < FLOAT32_TOLERANCE


def unequal(team: Team) -> str:
    context = team.context(BurstConfig(timeout_seconds=30))
    x = torch.zeros(1, 4 + 2 * (context.rank == 1), 2, 8)
    with pytest.raises(ValueError) as error:
        ring_attention(x, x, x, context, mask=Mask.causal())
    return str(error.value)


def test_360_llama_factory_69_unequal_lengths_are_an_error_and_no_hang(
    workers: WorkerPool,
) -> None:
    for text in workers.run(2, unequal):
        assert re.search(r"(?s)disagree on what attention is asked for.*\(1, 4, .*\(1, 6, ", text)
