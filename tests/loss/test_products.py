"""dW in float32 from narrow products, by the way that a device has. (fast tier)"""

import logging

import pytest
import torch

from megatron_burst.loss import products
from megatron_burst.loss.products import LogitsGradient, add_product, best_way, rounded_parts


def tensors(
    tokens: int, rows: int, width: int
) -> tuple[torch.Tensor, LogitsGradient, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(tokens, rows)
    hidden = torch.randn(tokens, width).bfloat16()
    return torch.randn(rows, width), LogitsGradient(wide.bfloat16(), wide), hidden


@pytest.mark.parametrize(("tokens", "rows", "width"), [(8, 50, 16), (1, 3, 64), (64, 10, 8)])
def test_rounded_parts_have_as_many_rows_as_there_are_tokens(
    tokens: int, rows: int, width: int
) -> None:
    total, gradient, hidden = tensors(tokens, rows, width)
    expected = total.double() + gradient.narrow.double().t() @ hidden.double()
    rounded_parts(total, gradient, hidden)
    torch.testing.assert_close(total.double(), expected, rtol=2**-7, atol=2**-6)


def test_on_the_cpu_nothing_is_rounded() -> None:
    total, gradient, hidden = tensors(8, 50, 16)
    expected = total.double() + gradient.wide.double().t() @ hidden.double()
    add_product(total, gradient, hidden)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_last_way_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """torch's CPU has no narrow products with a wide result, so it stands for an older GPU."""
    best_way.cache_clear()
    with caplog.at_level(logging.WARNING):
        way = best_way(torch.device("cpu"), torch.bfloat16, torch.float32)
    assert way is rounded_parts and "rounded before it is added" in caplog.text
    best_way.cache_clear()


def test_a_way_that_answers_wrongly_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    best_way.cache_clear()
    monkeypatch.setattr(products, "_sum_in_place", lambda *_: None)
    monkeypatch.setattr(products, "_wide_parts", rounded_parts)
    way = best_way(torch.device("cpu"), torch.bfloat16, torch.float32)
    assert way is rounded_parts
    best_way.cache_clear()
