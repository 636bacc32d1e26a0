"""What linear_cross_entropy refuses, and with which words. (fast tier)"""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_burst import linear_cross_entropy

HIDDEN, WEIGHT = torch.zeros(2, 3, 4), torch.zeros(10, 4)
TARGETS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 4, "memory_mb": 100}, "chunk_size = 4 and memory_mb = 100.*one of them"),
        ({"chunk_size": 0}, "chunk size .--lm-head-chunk-size. must be positive, got 0"),
        (
            {"memory_mb": 0.0001},
            r"--lm-head-memory-mb\) 9.9\S+ is too small for one token, with .*1 MiB",
        ),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\), got -0.1"),
        ({"z_loss": -1.0}, "z_loss must not be negative, and finite, got -1.0"),
        ({"z_loss": math.nan}, "z_loss must not be negative, and finite, got nan"),
        ({"z_loss": math.inf}, "z_loss must not be negative, and finite, got inf"),
        ({"logit_softcap": 0.0}, "logit_softcap must be positive and finite, or None, got 0.0"),
        ({"logit_softcap": math.nan}, "positive and finite, or None, got nan"),
        ({"logit_softcap": math.inf}, "positive and finite, or None, got inf"),
        ({"logit_scale": math.nan}, "logit_scale must be finite, got nan"),
        ({"logit_scale": -math.inf}, "logit_scale must be finite, got -inf"),
        ({"memory_mb": math.nan}, "memory_mb must be finite, got nan"),
        ({"memory_mb": math.inf}, "memory_mb must be finite, got inf"),
        ({"weight": torch.zeros(0, 4)}, r"the weight \(0, 4\) is empty"),
        ({"weight": torch.zeros(10, 0), "hidden": torch.zeros(2, 3, 0)}, r"\(10, 0\) is empty"),
        ({"weight": WEIGHT.double()}, "hidden is torch.float32 and weight torch.float64"),
        ({"weight": torch.zeros(10, 5)}, r"hidden \(2, 3, 4\) does not fit weight \(10, 5\)"),
        ({"weight": torch.zeros(4)}, r"hidden \(2, 3, 4\) does not fit weight \(4,\)"),
        ({"targets": TARGETS.float()}, "targets are torch.float32, not integers"),
        ({"targets": TARGETS > 1}, "targets are torch.bool, not integers"),
        ({"targets": TARGETS.to("meta")}, "hidden is on cpu, weight on cpu, targets on meta: give"),
        ({"weight": WEIGHT.to("meta")}, "hidden is on cpu, weight on meta, targets on cpu: give"),
        ({"targets": TARGETS.t()}, r"targets \(3, 2\) do not fit hidden \(2, 3, 4\)"),
    ],
)
def test_what_is_no_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    tensors = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS}
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**tensors, **arguments})


@pytest.mark.parametrize("dtype", [torch.long, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="in one floating dtype of 16 bits or more"):
        linear_cross_entropy(HIDDEN.to(dtype), WEIGHT.to(dtype), TARGETS)


@pytest.mark.parametrize("number", ["label_smoothing", "z_loss", "logit_softcap", "logit_scale"])
def test_a_learned_number_is_refused(number: str) -> None:
    learned = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match=f"{number} is a number, which gets no gradient, and got a"):
        linear_cross_entropy(HIDDEN, WEIGHT, TARGETS, **{number: learned})


@pytest.mark.parametrize("number", ["label_smoothing", "z_loss", "logit_softcap", "logit_scale"])
def test_a_number_may_be_a_tensor_that_changes_before_the_backward(number: str) -> None:
    hidden, weight = torch.ones(2, 3, 4, requires_grad=True), torch.linspace(-1, 1, 40).view(10, 4)
    found = []
    for given in (torch.tensor(0.5), 0.5):
        loss = linear_cross_entropy(hidden, weight, TARGETS, **{number: given})
        if isinstance(given, torch.Tensor):
            given.fill_(0.25)
        found += torch.autograd.grad(loss.sum(), hidden)
    assert torch.equal(*found)


@pytest.mark.parametrize("target", [10, -1])
def test_a_target_outside_the_vocabulary_is_an_error_where_its_loss_counts(target: int) -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    targets = TARGETS.clone()
    targets[1, 0] = target
    loss = linear_cross_entropy(hidden, WEIGHT, targets)
    assert loss[1, 0] > 1e29 and (loss < 1e29).sum() == 5
    with pytest.raises(ValueError, match=f"target {target} is outside the vocabulary of 10 rows"):
        loss.sum().backward()


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tensors_without_values_have_gradients_without(device: str, reduction: str) -> None:
    """As when the memory of a step is counted."""
    with FakeTensorMode() if device == "cpu" else nullcontext():
        hidden, weight = (torch.empty(9, 4, device=device, requires_grad=True) for _ in range(2))
        targets = torch.zeros(9, dtype=torch.long, device=device)
        linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum().backward()
    assert hidden.grad is not None and weight.grad is not None


class OnAGpu(torch.Tensor):
    """A tensor that only says that it is on one."""

    device = torch.device("cuda")


def test_it_makes_nan_where_looking_would_cost() -> None:
    """On a GPU the host does not look."""
    from megatron_burst.loss.vocabulary import Vocabulary

    vocabulary, targets = Vocabulary(10, None), torch.tensor([3, 10, -1, -100])
    grad = torch.tensor([1.0, 0.0, 1.0, 1.0]).as_subclass(OnAGpu)
    found = vocabulary.check_gradient(grad, targets, vocabulary.locate(targets, -100))
    assert found.isnan().tolist() == [False, False, True, False]
    assert found.nan_to_num(0).tolist() == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_targets_of_any_integer_type(dtype: torch.dtype, reduction: str) -> None:
    """Of bytes -100, that of ignored ones, is 156."""
    hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(160, 4)
    loss = linear_cross_entropy(hidden, weight, (TARGETS + 156).to(dtype), reduction=reduction)
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), (TARGETS + 156).flatten())
    torch.testing.assert_close(loss.mean(), expected)
    found, right = (torch.autograd.grad(x.mean(), hidden)[0] for x in (loss, expected))
    torch.testing.assert_close(found, right)
