"""The surrogate of the output: its row products are delta, whatever dO. (fast tier)"""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_burst.attention.surrogate import row_products, surrogate_factor, surrogate_output
from tests.tier import examples

# Half the distance between neighbours above 1.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
SIZES = {
    "usual": 1.0,
    "tiny": 1e-30,
    "squares are 0": 1e-23,
    "subnormal": 1e-39,
    "smallest bfloat16": 2.0**-133,
    "huge": 1e30,
    "as huge as delta can be": 2e36,
}


def draw(seed: int, dtype: torch.dtype, dim: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 3, dim, generator=generator, dtype=torch.float64).to(dtype)


def products(dout: Tensor, out: Tensor) -> Tensor:
    return (dout.double() * out.double()).sum(-1).transpose(1, 2)


def norms(x: Tensor) -> Tensor:
    return x.double().norm(dim=-1).transpose(1, 2)


def check(dout: Tensor, out: Tensor) -> None:
    """Row products equal delta up to the rounding of the dtype; no row is longer than the true."""
    rounding = ROUNDING[dout.dtype]
    delta = row_products(dout, out)
    assert delta.shape == (dout.shape[0], dout.shape[2], dout.shape[1]) and delta.is_contiguous()
    factor = surrogate_factor(dout, out)
    assert factor.shape == delta.shape and factor.dtype == delta.dtype and factor.is_contiguous()
    found = surrogate_output(dout, factor)
    assert found.shape == dout.shape and found.dtype == dout.dtype
    assert found.isfinite().all()
    # Below the smallest normal number roundings are absolute.
    floor = 64 * 2.0**-149 * (1 + norms(found))
    wanted = delta.double()
    error = (products(dout, found) - wanted).abs()
    usual = torch.finfo(factor.dtype).tiny <= factor.abs()
    usual &= factor.abs() < torch.finfo(factor.dtype).max
    sums = 2 * dout.shape[-1] * min(rounding, 2.0**-24)
    bound = (2 * rounding + sums) * wanted.abs() + dout.shape[-1] * floor
    assert (error <= torch.where(usual, bound, wanted.abs() * (1 + sums) + bound)).all()
    floor = floor + norms(dout) * 4 * 2.0**-149  # of a factor below the smallest normal number
    # Of a delta below it, which is then divided.
    floor = floor + dout.shape[-1] * 2.0**-149 / norms(dout).clamp_min(2.0**-149)
    assert (norms(found) <= norms(out) * (1 + 2 * rounding + sums) + floor).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_of_every_size_side_by_side(dtype: torch.dtype) -> None:
    out, dout = draw(0, dtype), draw(1, torch.float64).clamp(-3, 3)
    sizes = torch.tensor([*SIZES.values(), 0.0, 1e-3, 1e3], dtype=torch.float64)
    dout = (dout.flatten(0, 1) * sizes[:, None, None]).unflatten(0, (2, 5)).to(dtype)
    check(dout, out)
    dark = surrogate_output(dout, surrogate_factor(dout, out))[1, 2]
    assert not dark.any()


def test_a_row_whose_entries_differ_in_size_by_all_of_float32() -> None:
    out = draw(0, torch.float32)
    dout = draw(1, torch.float32)
    dout[..., ::2] *= 1e-38
    dout[..., 1::4] *= 1e37
    check(dout, out)


@examples(100)
@example(dtype=torch.float32, dim=1, exponent=-35.0, out_exponent=-3.0, seed=0)  # delta: subnormal
@given(
    dtype=st.sampled_from([*ROUNDING]),
    dim=st.integers(1, 130),
    exponent=st.floats(-42, 37.5),
    out_exponent=st.floats(-3, 0),
    seed=st.integers(0, 2**31),
)
def test_any_size(
    dtype: torch.dtype, dim: int, exponent: float, out_exponent: float, seed: int
) -> None:
    out = draw(seed, torch.float64, dim).mul(10**out_exponent).to(dtype)
    dout = draw(seed + 1, torch.float64, dim).clamp(-3, 3).mul(10**exponent).to(dtype)
    if row_products(dout, out).isfinite().all():
        check(dout, out)


def test_it_is_the_projection_on_the_gradient() -> None:
    dout, out = draw(0, torch.float64), draw(1, torch.float64)
    scale = (dout * out).sum(-1, keepdim=True) / dout.square().sum(-1, keepdim=True)
    torch.testing.assert_close(surrogate_output(dout, surrogate_factor(dout, out)), dout * scale)


def test_delta_is_float32_or_better() -> None:
    dout, out = draw(0, torch.bfloat16, 128), draw(1, torch.bfloat16, 128)
    delta = row_products(dout, out)
    assert delta.dtype == torch.float32
    torch.testing.assert_close(delta.double(), products(dout, out), rtol=1e-4, atol=1e-5)
    assert row_products(dout.double(), out.double()).dtype == torch.float64
