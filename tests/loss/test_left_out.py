"""Tokens that make no loss, or get no gradient, cost no products. (fast tier)"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst import linear_cross_entropy
from tests.loss.oracle import errors, make_case, oracle, ours
from tests.loss.test_memory import MIB, peak_bytes

TOLERANCE = 2e-6  # float32


class Products(TorchDispatchMode):
    """Counts the multiplications of products, in place or not."""

    number = 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f.overloadpacket.__name__
        if name in ("mm", "addmm_"):
            left, right = args[-2:]
            self.number += left.shape[0] * left.shape[1] * right.shape[1]
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_products_are_of_what_counts(reduction: str, share: float) -> None:
    """Logits twice, or once under a reduction, dh and dW."""
    case = make_case((8, 40), 64, 16)
    case.targets.random_(64, generator=torch.Generator().manual_seed(0))
    case.targets[torch.arange(320).view(8, 40) < 320 * share] = -100
    inputs = [x.requires_grad_() for x in (case.hidden, case.weight)]
    options: Any = {"reduction": reduction, "chunk_size": 48}
    with Products() as products:
        linear_cross_entropy(*inputs, case.targets, **options).sum().backward()
    kept = (case.targets >= 0).sum()
    assert products.number == (4 if reduction == "none" else 3) * kept * 64 * 16


def test_backward_is_of_losses_that_count() -> None:
    """Whoever masks losses by a product need not ignore their targets."""
    case = make_case((8, 40), 64, 16)
    case.grad[:, 7:] = 0
    with Products() as products:
        found = ours(case, chunk_size=48)
    kept, counted = (case.targets >= 0).sum(), ((case.targets >= 0) & (case.grad != 0)).sum()
    assert products.number == (kept + 3 * counted) * 64 * 16
    assert max(errors(found, oracle(case))) < TOLERANCE


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_limit_holds(reduction: str, dtype: torch.dtype) -> None:
    def function(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        targets[targets % 3 == 0] = -100
        options: Any = {"reduction": reduction, "memory_mb": 4}
        return linear_cross_entropy(hidden, weight, targets, **options)

    size = {"tokens": 2048, "vocabulary": 512, "hidden": 256, "dtype": dtype}
    kept = 2048 * 8  # of each token, which: of what forward or backward works on
    assert peak_bytes(function, **size, device="cpu") <= 4 * MIB + kept
