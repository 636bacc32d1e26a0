"""The fused Triton kernels: interpreted on the CPU, against float64. (fast tier)"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_burst.attention import surrogate
from megatron_burst.attention.launches import Rows, RowTable
from megatron_burst.attention.sums import PartialOutputs, Sums, WireDtypes
from megatron_burst.attention.surrogate import row_products, surrogate_factor, surrogate_output
from megatron_burst.kernels import in_triton
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.plans.visibility.interval import Interval
from tests.kernels.triton_here import fused, interpreted

CLOSE = 1e-6  # of float32, relative to what is added
BF16, F32 = torch.bfloat16, torch.float32
INF = math.inf
OUTPUT = Item(Kind.OUTPUT, 0)


pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")  # of -inf


@pytest.fixture(autouse=True)
def triton_serves_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(in_triton, "why_plain", lambda *_: "")
    with interpreted(fused):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def rows_of_more(x: Tensor) -> Tensor:
    return torch.cat([x[:, :3], x, x[:, :2]], 1)[:, 3:-2]


def cut_heads(x: Tensor) -> Tensor:
    return torch.cat([x, x[..., :8]], -1)[..., :-8]


CASES: list[tuple[int, torch.dtype, Callable[[Tensor], Tensor]]] = [
    (13, F32, Tensor.contiguous),
    (40, BF16, heads_first),
    (64, BF16, rows_of_more),
    (128, F32, heads_first),
    (192, BF16, cut_heads),
    (256, BF16, Tensor.contiguous),
]
EVERY_CASE = pytest.mark.parametrize(("dim", "dtype", "placed"), CASES)


def close(found: Tensor, expected: Tensor, terms: Tensor | float = 0.0) -> bool:
    """Whether float32 equals float64, relative to the largest of what is added."""
    both_infinite = found.double() == expected
    error = (found.double() - expected).abs()
    return bool((both_infinite | (error <= CLOSE * (expected.abs() + terms))).all())


def merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two (out, lse) in float64, with -inf for a row that has seen nothing."""
    (x, x_lse), (y, y_lse) = ([t.double() for t in pair] for pair in (a, b))
    lse = torch.logaddexp(x_lse, y_lse)
    x_weight, y_weight = ((t - lse).exp().nan_to_num(0.0).mT[..., None] for t in (x_lse, y_lse))
    return x * x_weight + y * y_weight, lse


@EVERY_CASE
def test_merging_equals_float64(
    dim: int, dtype: torch.dtype, placed: Callable[[Tensor], Tensor]
) -> None:
    results = PartialOutputs(0, torch.empty(2, 33, 2, 1, dtype=dtype), dim)
    first = draw(2, 33, 2, dim, dtype=dtype), 9 * draw(2, 2, 33, seed=1)
    second = placed(draw(2, 33, 2, dim, dtype=dtype, seed=2)), 9 * draw(2, 2, 33, seed=3)
    first[1][0, :, :5], second[1][0, :, 3:9] = -INF, -INF  # three rows see nothing at all
    first[0][0, :5], second[0][0, 3:9] = 0, 0
    expected = merged(first, second)
    results.take(OUTPUT, first, {})
    results.take(OUTPUT, second, {})
    out, lse = results.total(OUTPUT)
    assert out.dtype == lse.dtype == torch.float32
    assert close(out, expected[0], torch.maximum(first[0].abs(), second[0].abs()).double())
    assert close(lse, expected[1], 1.0)
    assert lse[0, :, 3:5].isneginf().all() and not out[0, 3:5].any()


ROWS: list[Rows] = [Interval(5, 31), RowTable(torch.tensor([7, 0, 30, 4, 32]))]


@pytest.mark.parametrize("rows", ROWS, ids=["slice", "table"])
def test_merging_some_rows_leaves_the_others(rows: Rows) -> None:
    """By a slice of a lse, which is strided, too."""
    index = rows.index if isinstance(rows, RowTable) else torch.arange(*rows)
    results = PartialOutputs(0, torch.empty(2, 33, 2, 40), 40)
    first = draw(2, 33, 2, 40), draw(2, 2, 33, seed=1)
    part = draw(2, len(index), 2, 40, seed=2), draw(2, 2, len(index), seed=3).transpose(0, 1)
    expected_out, expected_lse = first[0].double(), first[1].double()
    some = first[0][:, index], first[1][:, :, index]
    expected_out[:, index], expected_lse[:, :, index] = merged(some, part)
    results.add(OUTPUT, Interval(0, 33), tuple(t.clone() for t in first))
    results.add(OUTPUT, rows, part)
    out, lse = results.finish()
    assert close(out, expected_out, 4.0) and close(lse, expected_lse, 1.0)
    others = sorted({*range(33)} - {*index.tolist()})
    assert torch.equal(out[:, others], first[0][:, others])


def test_what_is_not_a_number_is_seen() -> None:
    results = PartialOutputs(0, torch.empty(1, 4, 1, 8), 8)
    results.add(OUTPUT, Interval(0, 4), (torch.ones(1, 4, 1, 8), torch.zeros(1, 1, 4)))
    lse = torch.tensor([0.0, math.nan, 0.0, 0.0])[None, None]
    out = torch.ones(1, 4, 1, 8)
    out[0, 2, 0, 3] = math.nan
    results.take(OUTPUT, (out, lse), {})
    found, found_lse = results.finish()
    assert found_lse.isnan()[0, 0].tolist() == [False, True, False, False]
    assert found.isnan().any(-1)[0, :, 0].tolist() == [False, True, True, False]


@pytest.mark.parametrize(("rows", "dtype"), [(ROWS[0], BF16), (ROWS[1], F32)])
def test_gradients_are_added(rows: Rows, dtype: torch.dtype) -> None:
    """Those of k and v in MLA, one of them a slice of wider heads."""
    index = rows.index if isinstance(rows, RowTable) else torch.arange(*rows)
    shaped = torch.empty(2, 33, 2, 192, dtype=dtype), torch.empty(2, 33, 2, 128, dtype=dtype)
    sums, item = Sums(0, {Kind.D_KV: shaped}, WireDtypes()), Item(Kind.D_KV, 0)
    wholes = [[draw(*t.shape, dtype=dtype, seed=seed) for t in shaped] for seed in (1, 2)]
    parts = [cut_heads(draw(2, len(index), *t.shape[2:], dtype=dtype, seed=3)) for t in shaped]
    expected = [sum(t.double() for t in pair) for pair in zip(*wholes, strict=True)]
    terms = [sum(t.double().abs() for t in pair) for pair in zip(*wholes, strict=True)]
    for whole in wholes:  # they become its own
        sums.add(item, Interval(0, 33), tuple(whole))
    sums.add(item, rows, tuple(parts))
    for found, total, part, largest in zip(sums.total(item), expected, parts, terms, strict=True):
        assert isinstance(total, Tensor)
        total[:, index] += part.double()
        assert found.dtype == torch.float32 and close(found, total, largest)


@EVERY_CASE
def test_row_products_and_the_surrogate(
    dim: int, dtype: torch.dtype, placed: Callable[[Tensor], Tensor]
) -> None:
    dout, out = draw(2, 33, 2, dim, dtype=dtype), draw(2, 33, 2, dim, dtype=dtype, seed=1)
    dout[0] *= 1e-30
    dout[1, :9] = 0
    out = placed(out)
    x, y = dout.double(), out.double()
    delta, sizes = (x * y).sum(-1).mT, (x * y).abs().sum(-1).mT
    assert close(row_products(dout, out), delta, sizes)
    squares = x.square().sum(-1).mT
    expected = torch.where(squares > 0, delta / squares, 0.0)
    factor = surrogate_factor(dout, out)
    assert factor.dtype == torch.float32 and factor.is_contiguous()
    assert close(factor, expected, torch.where(squares > 0, sizes / squares, 0.0) * 4)
    found, wanted = surrogate_output(dout, factor), x * factor.double().mT[..., None]
    assert found.dtype == dtype
    # Half a unit in the last place, but the interpreter cuts bfloat16 off.
    rounding = torch.finfo(dtype).eps / (1 if dtype == BF16 else 2)
    error = (found.double() - wanted).abs()
    assert (error <= wanted.abs() * rounding * 1.001 + 2.0**-149).all()


@pytest.mark.parametrize("size", [1e-39, 1e-23, 1e30])
def test_the_factor_of_gradients_of_any_size(size: float) -> None:
    dout, out = draw(1, 5, 2, 64) * size, draw(1, 5, 2, 64, seed=1)
    dout[0, 1] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surrogate, "triton_kernels", lambda _: None)
        expected = surrogate_factor(dout, out)
    found = surrogate_factor(dout, out)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    out[0, 0, 0, 0] = math.nan
    assert surrogate_factor(dout, out).isnan().sum() == 1
