"""Losses and gradients on one rank equal those of all logits in float64. (fast tier)"""

import pytest
import torch
import torch.nn.functional as F

from megatron_burst import linear_cross_entropy
from tests.loss.oracle import OBJECTIVES, Case, errors, make_case, oracle, ours, relative_error

TOLERANCE = 2e-6  # float32


@pytest.mark.parametrize("chunk_size", [1, 4, 5, 21, 100])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_float32_equals_float64(objective: str, chunk_size: int) -> None:
    """21 tokens: chunks that divide them, that do not, one token, all, more than there are."""
    arguments = OBJECTIVES[objective]
    case = make_case(ignore_index=arguments.get("ignore_index", -100))
    found = ours(case, chunk_size=chunk_size, **arguments)
    assert max(errors(found, oracle(case, **arguments))) < TOLERANCE
    assert found.loss.dtype == torch.float32 and found.loss.shape == case.targets.shape


@pytest.mark.parametrize("vocabulary", [128, 1000, 4096])
def test_larger_vocabularies(vocabulary: int) -> None:
    case = make_case((333,), vocabulary, 64)
    found = ours(case, chunk_size=100)
    assert max(errors(found, oracle(case))) < TOLERANCE


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_agree_with_differences(objective: str) -> None:
    case = make_case((5,), 7, 4, torch.float64)

    def mean(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(
            *(hidden, weight, case.targets % 7), **OBJECTIVES[objective], chunk_size=2
        ).mean()

    inputs = (case.hidden.requires_grad_(), case.weight.requires_grad_())
    # A second backward computes the logits again, which rounds differently.
    assert torch.autograd.gradcheck(mean, inputs, nondet_tol=1e-12)


@pytest.mark.parametrize(
    "tokens", [(1,), (1, 1), (0,), (2, 0), ()], ids=["one", "1 x 1", "none", "2 x none", "scalar"]
)
def test_hardly_any_tokens(tokens: tuple[int, ...]) -> None:
    case = make_case(tokens)
    found = ours(case, torch.ones_like(case.grad))
    expected = oracle(case, torch.ones_like(case.grad)) if case.targets.numel() else None
    assert found.loss.shape == tokens and found.d_hidden.shape == (*tokens, 16)
    assert found.d_weight.shape == case.weight.shape
    if expected is None:
        assert not found.d_weight.any()
    else:
        assert max(errors(found, expected)) < TOLERANCE


@pytest.mark.parametrize("objective", ["plain", "all"])
def test_all_tokens_ignored_make_zeros(objective: str) -> None:
    case = make_case()
    case.targets.fill_(-100)
    found = ours(case, chunk_size=4, **OBJECTIVES[objective])
    assert not any(part.any() for part in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_make_losses_in_float32(dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype)
    grad = torch.full_like(case.grad, 0.5)
    found = ours(case, grad, chunk_size=5)
    assert found.loss.dtype == torch.float32
    assert found.d_hidden.dtype == found.d_weight.dtype == dtype
    assert max(errors(found, oracle(case, grad))) < 2**-7


def test_float64_stays_float64() -> None:
    case = make_case(dtype=torch.float64)
    found = ours(case, chunk_size=5)
    assert found.loss.dtype == torch.float64
    assert max(errors(found, oracle(case))) < 1e-14


def test_large_logits_do_not_overflow() -> None:
    case = make_case()
    case = case._replace(hidden=case.hidden * 1e3)
    found = ours(case, chunk_size=5)
    expected = oracle(case)
    assert errors(found, expected)[0] < TOLERANCE
    assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_only_one_input_wants_a_gradient(which: str) -> None:
    case = make_case()
    grad = torch.full_like(case.grad, 0.37)
    hidden = case.hidden.clone().requires_grad_(which == "hidden")
    weight = case.weight.clone().requires_grad_(which == "weight")
    linear_cross_entropy(hidden, weight, case.targets, chunk_size=4).backward(grad)
    expected = oracle(case, grad)
    wanted, other = (hidden, weight) if which == "hidden" else (weight, hidden)
    assert wanted.grad is not None and other.grad is None
    assert relative_error(wanted.grad, getattr(expected, f"d_{which}")) < TOLERANCE


def test_without_gradients_there_is_no_graph_and_none_are_made() -> None:
    case = make_case()
    weight = case.weight.clone().requires_grad_()
    hidden = case.hidden.clone().requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, case.targets)
    assert not loss.requires_grad
    assert relative_error(loss, oracle(case).loss) < TOLERANCE


def test_non_contiguous_inputs() -> None:
    case = make_case((6, 8))
    turned = Case(
        case.hidden.transpose(0, 1),
        case.weight.t().contiguous().t(),
        case.targets.t(),
        case.grad.t(),
    )
    found = ours(turned, chunk_size=5)
    assert max(errors(found, oracle(turned))) < TOLERANCE


def test_backward_may_run_twice() -> None:
    case = make_case()
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = linear_cross_entropy(hidden, weight, case.targets).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    first = [part.clone() for part in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


def test_a_changed_weight_is_noticed() -> None:
    case = make_case()
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = linear_cross_entropy(hidden, weight, case.targets).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_leaves_the_inputs_dtypes_alone() -> None:
    case = make_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ours(case, chunk_size=5)
    assert max(errors(found, oracle(case))) < TOLERANCE


def test_padded_rows_take_part_like_all_others() -> None:
    """As in Megatron: rows beyond the tokenizer's vocabulary are in the softmax."""
    case = make_case(vocabulary=64)
    targets = case.targets.clamp_max(49)
    padded = case._replace(targets=targets)
    found = ours(padded, chunk_size=4)
    assert max(errors(found, oracle(padded))) < TOLERANCE
    without = F.cross_entropy(
        F.linear(case.hidden, case.weight[:50]).flatten(0, -2), targets.flatten(), reduction="none"
    ).view_as(targets)
    counted = targets >= 0
    assert (found.loss[counted] > without[counted] + 1e-3).all()


def test_the_same_call_gives_the_same_bits() -> None:
    case = make_case((64,), 500, 32)
    first, second = (ours(case, chunk_size=10) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
