"""The work between attention calls as Triton kernels; its callers have the plain torch beside it.

A program has some rows of one head, because what a row has beside, as its log-sum-exp, lies along
the tokens. Each element is read and written by one program, so results are deterministic.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.kernels.in_triton import operator

_ELEMENTS = 4096  # of a program of 4 warps: eight loads of 16 bytes a thread
_UNIT = 8  # in which strides are passed, so that 16 bytes of bfloat16 are known to be aligned


def _kernel(function: Callable[..., None]) -> Any:
    """Compile a kernel once for its dtypes, constants and alignment, whatever the lengths are."""
    names = inspect.signature(function).parameters
    integers = [n for n, p in names.items() if p.annotation in (tl.int32, tl.int64)]
    a_number_a_row = [n for n in names if n.endswith(("lse", "index", "factor"))]
    return triton.jit(
        function, do_not_specialize=integers, do_not_specialize_on_alignment=a_number_a_row
    )


@triton.jit
def _rows(heads: tl.int32, ROWS: tl.constexpr) -> tl.tensor:
    """Return this program's batch, head and rows."""
    row = tl.program_id(0) // heads * ROWS + tl.arange(0, ROWS)
    return tl.program_id(1), tl.program_id(0) % heads, row


@_kernel
def _merge(
    total: tl.tensor, total_b: tl.int64, total_s: tl.int64, total_h: tl.int64,
    part: tl.tensor, part_b: tl.int64, part_s: tl.int64, part_h: tl.int64,
    lse: tl.tensor, lse_b: tl.int64, lse_s: tl.int64, lse_h: tl.int64,
    part_lse: tl.tensor, part_lse_b: tl.int64, part_lse_s: tl.int64, part_lse_h: tl.int64,
    index: tl.tensor, rows: tl.int32, heads: tl.int32,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    batch, head, row = _rows(heads, ROWS)
    column, exists, to = tl.arange(0, BLOCK)[None, :], row < rows, row
    if index is not None:
        to = tl.load(index + row, mask=exists, other=0)
    lse += batch * lse_b + to * lse_s + head * lse_h
    part_lse += batch * part_lse_b + row * part_lse_s + head * part_lse_h
    ours = tl.load(lse, mask=exists, other=0.0)
    theirs = tl.load(part_lse, mask=exists, other=0.0)
    highest = tl.maximum(ours, theirs)
    base = tl.where(highest == -float("inf"), 0.0, highest)  # -inf - -inf would be NaN
    weight, part_weight = tl.exp(ours - base), tl.exp(theirs - base)
    sum_of_weights = weight + part_weight
    scale = 1.0 / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)

    valid = exists[:, None] & (column < DIM)
    total += (batch * total_b + to * total_s + head * total_h)[:, None] * UNIT + column
    part += (batch * part_b + row * part_s + head * part_h)[:, None] * UNIT + column
    x, y = tl.load(total, mask=valid), tl.load(part, mask=valid).to(tl.float32)
    merged = x * (weight * scale)[:, None] + y * (part_weight * scale)[:, None]
    tl.store(total, merged, mask=valid)
    tl.debug_barrier()  # several threads have read a row's log-sum-exp, one writes it
    tl.store(lse, base + tl.log(sum_of_weights), mask=exists)


@operator("total_BSHD", "total_lse_BHS")
def merge(
    total_BSHD: Tensor,
    total_lse_BHS: Tensor,
    part_BSHD: Tensor,
    part_lse_BHS: Tensor,
    index: Tensor | None,
) -> None:
    """Add a partial (out, lse) to the running one in float32, as `PartialOutputs` says.

    Row i of the part belongs to row i of the total, or to row index[i], none of them twice.
    """
    _launch(_merge, (total_BSHD, part_BSHD), (total_lse_BHS, part_lse_BHS), index=index)


@_kernel
def _add(
    total: tl.tensor, total_b: tl.int64, total_s: tl.int64, total_h: tl.int64,
    part: tl.tensor, part_b: tl.int64, part_s: tl.int64, part_h: tl.int64,
    index: tl.tensor, rows: tl.int32, heads: tl.int32,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    batch, head, row = _rows(heads, ROWS)
    column, exists, to = tl.arange(0, BLOCK)[None, :], row < rows, row
    if index is not None:
        to = tl.load(index + row, mask=exists, other=0)
    valid = exists[:, None] & (column < DIM)
    total += (batch * total_b + to * total_s + head * total_h)[:, None] * UNIT + column
    part += (batch * part_b + row * part_s + head * part_h)[:, None] * UNIT + column
    x, y = tl.load(total, mask=valid), tl.load(part, mask=valid).to(tl.float32)
    tl.store(total, x + y, mask=valid)


@operator("total_BSHD")
def add(total_BSHD: Tensor, part_BSHD: Tensor, index: Tensor | None) -> None:
    """Add a part of any dtype to a total in float32; its rows are as in `merge`."""
    _launch(_add, (total_BSHD, part_BSHD), index=index)


@_kernel
def _row_products(
    x: tl.tensor, x_b: tl.int64, x_s: tl.int64, x_h: tl.int64,
    y: tl.tensor, y_b: tl.int64, y_s: tl.int64, y_h: tl.int64,
    factor: tl.tensor, factor_b: tl.int64, factor_s: tl.int64, factor_h: tl.int64,
    rows: tl.int32, heads: tl.int32, OVER_SQUARES: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    batch, head, row = _rows(heads, ROWS)
    column, exists = tl.arange(0, BLOCK)[None, :], row < rows
    valid = exists[:, None] & (column < DIM)
    x += (batch * x_b + row * x_s + head * x_h)[:, None] * UNIT + column
    y += (batch * y_b + row * y_s + head * y_h)[:, None] * UNIT + column
    a = tl.load(x, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(y, mask=valid, other=0.0).to(tl.float32)
    result = tl.sum(a * b, 1)
    if OVER_SQUARES:
        largest = tl.max(tl.abs(a), 1)
        largest = tl.where(largest > 0.0, largest, 1.0)
        share = tl.div_rn(a, tl.broadcast_to(largest[:, None], [ROWS, BLOCK]))
        squares = tl.sum(share * share, 1)
        squares = tl.where(squares < 1.0, 1.0, squares)
        result = tl.div_rn(tl.div_rn(tl.div_rn(result, largest), squares), largest)
        bound = 3.4028234663852886e38
        result = tl.where(result > bound, bound, tl.where(result < -bound, -bound, result))
    factor += batch * factor_b + row * factor_s + head * factor_h
    tl.store(factor, result, mask=exists)


@operator("out_BHS")
def row_products(out_BHS: Tensor, x_BSHD: Tensor, y_BSHD: Tensor, over_squares: bool) -> None:
    """Write rowsum(x ∘ y) in float32, or that over ‖x‖² as `surrogate_factor` says."""
    _launch(_row_products, (x_BSHD, y_BSHD), (out_BHS,), OVER_SQUARES=over_squares)


@_kernel
def _scale_rows(
    out: tl.tensor, out_b: tl.int64, out_s: tl.int64, out_h: tl.int64,
    x: tl.tensor, x_b: tl.int64, x_s: tl.int64, x_h: tl.int64,
    factor: tl.tensor, factor_b: tl.int64, factor_s: tl.int64, factor_h: tl.int64,
    rows: tl.int32, heads: tl.int32,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
) -> None:  # fmt: skip
    batch, head, row = _rows(heads, ROWS)
    column, exists = tl.arange(0, BLOCK)[None, :], row < rows
    valid = exists[:, None] & (column < DIM)
    factor += batch * factor_b + row * factor_s + head * factor_h
    x += (batch * x_b + row * x_s + head * x_h)[:, None] * UNIT + column
    out += (batch * out_b + row * out_s + head * out_h)[:, None] * UNIT + column
    scaled = tl.load(x, mask=valid).to(tl.float32) * tl.load(factor, mask=exists)[:, None]
    tl.store(out, scaled.to(out.dtype.element_ty), mask=valid)


@operator("out_BSHD")
def scale_rows(out_BSHD: Tensor, x_BSHD: Tensor, factor_BHS: Tensor) -> None:
    """Write x times a float32 number a row, rounded once to the dtype of `out_BSHD`."""
    _launch(_scale_rows, (out_BSHD, x_BSHD), (factor_BHS,))


def _launch(
    kernel: Any,
    tensors_BSHD: tuple[Tensor, Tensor],  # the second has the rows that there is work for
    numbers_BHS: tuple[Tensor, ...] = (),
    **more: Any,
) -> None:
    """Run a kernel on tensors, each with its strides, and on numbers a row."""
    batch, rows, heads, dim = tensors_BSHD[1].shape
    lie_together = all(t.stride(-1) == 1 or dim == 1 for t in tensors_BSHD)
    assert lie_together, "a head's numbers lie together"
    strides = [t.stride()[:3] for t in tensors_BSHD]
    unit = 1 if any(s % _UNIT for each in strides for s in each) else _UNIT
    arguments: list[Any] = []
    for t, each in zip(tensors_BSHD, strides, strict=True):
        arguments += t, *(s // unit for s in each)
    for x in numbers_BHS:
        of_batch, of_head, of_token = x.stride()
        arguments += x, of_batch, of_token, of_head
    sizes = _blocks(dim)
    grid = heads * triton.cdiv(rows, sizes["ROWS"]), batch
    kernel[grid](*arguments, rows=rows, heads=heads, DIM=dim, UNIT=unit, **sizes, **more)


def _blocks(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"BLOCK": block, "ROWS": max(1, _ELEMENTS // block)}
