"""Losses and gradients on one rank equal those of all logits in float64. (fast tier)"""

import pytest
import torch

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
    assert found.loss.dtype == torch.float32 and found.loss.shape[-2:] == case.targets.shape


def turned(case: Case) -> Case:
    """The same without contiguous tensors."""
    weight = case.weight.t().contiguous().t()
    return Case(case.hidden.transpose(0, 1), weight, case.targets.t(), case.grad.t())


SHAPES = {
    "larger vocabularies": make_case((333,), 4096, 64),
    "a vocabulary of no power of two": make_case((333,), 1000, 64),
    "not contiguous": turned(make_case((6, 8))),
}


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_equal_float64(name: str) -> None:
    case = SHAPES[name]
    for autocast in (False, True):  # which leaves the inputs' dtypes alone
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = ours(case, chunk_size=100)
        assert max(errors(found, oracle(case))) < TOLERANCE


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


@pytest.mark.parametrize("objective", ["plain", "all", "entropy"])
def test_all_tokens_ignored_make_zeros(objective: str) -> None:
    case = make_case()
    case.targets.fill_(-100)
    found = ours(case, chunk_size=4, **OBJECTIVES[objective])
    assert not any(part.any() for part in found)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-7), (torch.float64, 1e-14)]
)
def test_losses_are_float32_or_wider_and_gradients_as_the_inputs(
    dtype: torch.dtype, limit: float
) -> None:
    case = make_case(dtype=dtype)
    grad = torch.full_like(case.grad, 0.5)
    found = ours(case, grad, chunk_size=5)
    assert found.loss.dtype == torch.promote_types(dtype, torch.float32)
    assert found.d_hidden.dtype == found.d_weight.dtype == dtype
    assert max(errors(found, oracle(case, grad))) < limit


def test_large_logits_do_not_overflow() -> None:
    case = make_case()
    case = case._replace(hidden=case.hidden * 1e3)
    found = ours(case, chunk_size=5)
    expected = oracle(case)
    assert errors(found, expected)[0] < TOLERANCE
    assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_only_one_input_wants_a_gradient(which: str, reduction: str) -> None:
    case, options = make_case(), {"chunk_size": 4, "reduction": reduction}
    wanted, other = (case.hidden, case.weight)[:: 1 if which == "hidden" else -1]
    wanted.requires_grad_()
    (linear_cross_entropy(*case[:3], **options).sum() * 0.37).backward()
    assert wanted.grad is not None and other.grad is None
    expected = oracle(case, torch.full_like(case.grad, 0.37))
    assert relative_error(wanted.grad, getattr(expected, f"d_{which}")) < TOLERANCE


def test_without_gradients_there_is_no_graph_and_none_are_made() -> None:
    case = make_case()
    weight = case.weight.clone().requires_grad_()
    hidden = case.hidden.clone().requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, case.targets)
    assert not loss.requires_grad
    assert relative_error(loss, oracle(case).loss) < TOLERANCE


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_backward_may_run_twice_and_a_changed_weight_is_noticed(reduction: str) -> None:
    case = make_case()
    inputs = [x.requires_grad_() for x in (case.hidden, case.weight)]
    loss = linear_cross_entropy(*inputs, case.targets, reduction=reduction).sum() * 0.37
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    first = [part.clone() for part in first]
    second = torch.autograd.grad(loss, inputs, retain_graph=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        case.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_same_call_gives_the_same_bits() -> None:
    case = make_case((64,), 500, 32)
    first, second = (ours(case, chunk_size=10) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("entropy", [False, True])
def test_losses_may_be_changed_in_place_as_torchs(entropy: bool) -> None:
    case = make_case()
    weight = case.weight.clone().requires_grad_()
    found = linear_cross_entropy(case.hidden, weight, case.targets, entropy=entropy)
    loss = found[0] if entropy else found
    total = loss.sum()
    loss.detach().div_(2)  # what is logged
    loss *= case.grad
    total.backward()
    expected = ours(case, torch.ones_like(case.grad)).d_weight
    assert weight.grad is not None and relative_error(weight.grad, expected) < TOLERANCE
