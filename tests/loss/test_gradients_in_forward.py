"""Gradients made in forward: used where the direction is as expected, right where not. (fast)"""

import logging

import pytest
import torch
from torch import Tensor

from megatron_burst import linear_cross_entropy
from megatron_burst.loss import autograd, call
from megatron_burst.loss.expected import expected_factor
from tests.loss.oracle import Case, Result, errors, make_case, oracle

TOLERANCE = 2e-6


@pytest.fixture
def computed_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever backward computes logits again."""
    times: list[int] = []
    original = autograd.gradients_again

    def counting(*args: object, **kwargs: object) -> object:
        times.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(autograd, "gradients_again", counting)
    return times


def run(case: Case, mask: Tensor | None, grad: Tensor, **arguments: object) -> Result:
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = linear_cross_entropy(
        *(hidden, weight, case.targets), loss_mask=mask, chunk_size=4, **arguments
    )
    return Result(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad))


MASKS = {
    "none": None,
    "zeros and ones": torch.tensor([1.0, 0, 1, 1, 0, 0, 1]).expand(3, 7),
    "fractions": torch.linspace(0.01, 0.9, 21).view(3, 7),
    "negative": torch.linspace(-1, 1, 21).view(3, 7),
    "boolean": torch.arange(21).view(3, 7) % 3 > 0,
    "integers": torch.arange(21).view(3, 7) % 4,
    "nothing": torch.zeros(3, 7),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("factor", [1.0, 0.37, -1e-6, 0.0])
def test_the_mask_times_a_factor_needs_no_second_computation(
    mask: str, factor: float, computed_again: list[int]
) -> None:
    case = make_case()
    grad = torch.full((3, 7), factor)
    if MASKS[mask] is not None:
        grad = grad * MASKS[mask]
    found = run(case, MASKS[mask], grad, gradients="forward")
    assert max(errors(found, oracle(case, grad))) < TOLERANCE
    assert not computed_again


def test_what_autograd_makes_of_a_masked_mean_fits(computed_again: list[int]) -> None:
    case = make_case()
    mask = (torch.rand(3, 7) > 0.4).float()
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = linear_cross_entropy(hidden, weight, case.targets, loss_mask=mask, gradients="forward")
    ((loss.view(-1) * mask.view(-1)).sum() / mask.sum() / 3).backward()
    expected = oracle(case, mask / mask.sum() / 3)
    assert max(errors(Result(loss.detach(), hidden.grad, weight.grad), expected)) < TOLERANCE
    assert not computed_again


@pytest.mark.parametrize("where", [0, 20])
@pytest.mark.parametrize("wrong", [2.0, 0.0, 1 + 1e-6, float("nan")])
def test_one_other_token_is_noticed_and_computed_again(
    where: int, wrong: float, computed_again: list[int]
) -> None:
    case = make_case()
    grad = torch.full((3, 7), 0.5)
    grad.view(-1)[where] *= wrong
    found = run(case, None, grad, gradients="forward")
    assert computed_again
    if wrong == wrong:
        assert max(errors(found, oracle(case, grad))) < TOLERANCE
    else:
        assert found.d_weight.isnan().any()


def test_a_masked_token_with_a_gradient_is_noticed(computed_again: list[int]) -> None:
    case, mask = make_case(), MASKS["zeros and ones"]
    grad = torch.ones(3, 7)
    found = run(case, mask, grad, gradients="forward")
    assert computed_again and max(errors(found, oracle(case, grad))) < TOLERANCE


def test_gradients_of_ignored_tokens_do_not_matter(computed_again: list[int]) -> None:
    case = make_case()
    grad = torch.where(case.targets == -100, torch.randn(3, 7), 0.5)
    found = run(case, None, grad, gradients="forward")
    assert not computed_again
    assert max(errors(found, oracle(case, grad))) < TOLERANCE


def test_computing_in_vain_is_said(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case()
    with caplog.at_level(logging.WARNING):
        run(case, None, case.grad, gradients="forward")
    assert "not loss_mask times one factor" in caplog.text


def test_auto_makes_them_in_forward_where_there_is_room(computed_again: list[int]) -> None:
    case = make_case((50,), 100, 32)
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    for memory_mb, again in ((1, 0), (0.02, 1)):  # dW takes 0.012 MiB
        loss = linear_cross_entropy(hidden, weight, case.targets, memory_mb=memory_mb)
        loss.sum().backward()
        assert len(computed_again) == again
    linear_cross_entropy(hidden, weight, case.targets, chunk_size=10).sum().backward()
    assert len(computed_again) == 2  # no limit, so no room is known of


def test_none_are_made_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("gradients in forward without a graph")

    monkeypatch.setattr(autograd, "loss_and_gradients", never)
    case = make_case()
    linear_cross_entropy(case.hidden, case.weight, case.targets, gradients="forward")
    with torch.no_grad():
        hidden = case.hidden.clone().requires_grad_()
        linear_cross_entropy(hidden, case.weight, case.targets)


def test_the_factor_and_the_answer_need_no_host() -> None:
    """On the device "meta" any question of the host is an error."""
    grad = torch.ones(10, device="meta")
    factor, matches = expected_factor(grad, grad)
    assert factor.shape == matches.shape == () and factor.is_meta and matches.is_meta


def test_nothing_expected_and_nothing_there() -> None:
    factor, matches = expected_factor(torch.zeros(3), torch.zeros(3))
    assert factor == 0 and matches
    factor, matches = expected_factor(torch.ones(3), torch.zeros(3))
    assert not matches


def test_auto_is_the_default() -> None:
    assert call.Call(objective=call.Objective()).gradients is call.Gradients.AUTO


def test_a_gradient_that_is_nan_where_it_does_not_count_stays_there(
    computed_again: list[int],
) -> None:
    case = make_case()
    grad = torch.where(case.targets == -100, torch.nan, torch.randn(3, 7))
    for gradients in ("forward", "backward"):
        found = run(case, None, grad, gradients=gradients)
        assert max(errors(found, oracle(case, grad.nan_to_num(0)))) < TOLERANCE
