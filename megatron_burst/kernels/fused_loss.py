"""A chunk's logits as Triton kernels; the loss has the plain torch beside them.

Logits are read in the dtype in which the product wrote them; all between is float32 and stays in
registers. An element is read and written by one program, in one order: results are deterministic.
The number of rows is a constant of the compiled kernel: a training has one vocabulary.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_burst.kernels.in_triton import operator

_COLUMNS = 2048  # of 4 warps at a time: two loads of 16 bytes a thread in bfloat16


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh within float32; near 0 by its series, where the quotient would cancel."""
    size, square = tl.abs(x), x * x
    series = -1382 / 155925 + square * (21844 / 6081075)
    series = -17 / 315 + square * (62 / 2835 + square * series)
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * series))
    small = tl.exp(-2.0 * size)
    quotient = (1.0 - small) / (1.0 + small)
    return tl.where(size < 0.5, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def _bounded(x: tl.tensor, scale: tl.float32, cap: tl.float32, CAPPED: tl.constexpr) -> tl.tensor:
    """Return scaled and capped logits in float32."""
    logits = x.to(tl.float32) * scale
    if CAPPED:
        logits = _tanh(logits / cap) * cap
    return logits


@triton.jit(do_not_specialize=["tokens"])
def _statistics(
    out: tl.tensor, best: tl.tensor, logits: tl.tensor, column: tl.tensor,
    tokens: tl.int32, scale: tl.float32, cap: tl.float32,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, SUMS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token, lane = tl.program_id(0), tl.arange(0, BLOCK)
    logits += token.to(tl.int64) * ROWS
    exponentials, sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    highest, where = -float("inf"), 0
    for start in range(0, ROWS, BLOCK):
        exists = start + lane < ROWS
        x = _bounded(tl.load(logits + start + lane, mask=exists, other=0.0), scale, cap, CAPPED)
        if SUMS:
            sums += tl.where(exists, x, 0.0)
        x = tl.where(exists, x, -float("inf"))
        largest = tl.max(x, 0)
        if best is not None:
            where = tl.where(largest > highest, start + tl.argmax(x, 0), where)
        largest = tl.maximum(largest, highest)
        if ENTROPY:
            lower = tl.where(start > 0, highest - largest, 0.0)
            weighted = (weighted + exponentials * lower) * tl.exp(lower)
            weighted += tl.where(exists, tl.exp(x - largest) * (x - largest), 0.0)
        exponentials = exponentials * tl.exp(highest - largest) + tl.exp(x - largest)
        highest = largest
    mine = tl.load(column + token)  # -1: another rank has it
    target = tl.load(logits + mine, mask=mine >= 0, other=0.0)
    target = tl.where(mine >= 0, _bounded(target, scale, cap, CAPPED), 0.0)
    tl.store(out + token, highest)
    tl.store(out + tokens + token, tl.sum(exponentials, 0))
    tl.store(out + 2 * tokens + token, target)
    if ENTROPY:
        tl.store(out + 3 * tokens + token, tl.sum(weighted, 0))
    if SUMS:
        tl.store(out + (4 if ENTROPY else 3) * tokens + token, tl.sum(sums, 0))
    if best is not None:
        tl.store(best + token, where)


@triton.jit
def _gradient(
    logits: tl.tensor, lse: tl.tensor, grad: tl.tensor,
    entropy: tl.tensor, grad_entropy: tl.tensor, column: tl.tensor,
    scale: tl.float32, cap: tl.float32,
    z_loss: tl.float32, smoothing: tl.float32, uniform: tl.float32,
    CAPPED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    blocks: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    logits += token.to(tl.int64) * ROWS
    given = tl.load(logits + at, mask=at < ROWS, other=0.0)
    x = _bounded(given, scale, cap, CAPPED)
    lse_of, mine = tl.load(lse + token), tl.load(column + token)
    gradient = tl.exp(x - lse_of) * (1.0 + 2.0 * z_loss * lse_of) - uniform
    gradient -= tl.where(at == mine, 1.0 - smoothing, 0.0)
    gradient *= tl.load(grad + token)
    if entropy is not None:
        surprise = x - lse_of
        of_entropy = tl.exp(surprise) * (surprise + tl.load(entropy + token))
        gradient -= tl.load(grad_entropy + token) * of_entropy
    if CAPPED:
        small = tl.exp(-2.0 * tl.abs(given.to(tl.float32) * scale / cap))
        gradient *= 4.0 * small / ((1.0 + small) * (1.0 + small))  # 1 - tanh²
    gradient *= scale
    tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < ROWS)


@operator("out_statistics", "out_best")
def logit_statistics(
    out_statistics: Tensor,
    out_best: Tensor | None,
    logits: Tensor,
    column: Tensor,
    scale: float,
    cap: float,
    *,
    entropy: bool,
) -> None:
    """Write what the logits of `logits` [tokens, rows] leave, scaled, and capped if cap > 0.

    [3 to 5, tokens] in float32: the largest, the sum of exp(logit - largest), that of `column`
    [tokens] (int64; -1: 0), for the entropy the sum of exp(logit - largest) (logit - largest), and
    perhaps the sum. And in which row the largest is, [tokens].
    """
    tokens, rows = logits.shape
    tensors, sums = (out_statistics, out_best, logits, column), len(out_statistics) == 4 + entropy
    flags, sizes = {"ENTROPY": entropy, "SUMS": sums}, {"ROWS": rows, "BLOCK": _COLUMNS}
    _statistics[tokens,](*tensors, tokens, scale, cap, CAPPED=cap > 0.0, **flags, **sizes)


@operator("logits")
def logit_gradient(
    logits: Tensor,
    lse: Tensor,
    grad: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    column: Tensor,
    scale: float,
    cap: float,
    z_loss: float,
    smoothing: float,
    uniform: float,
) -> None:
    """Turn logits [tokens, rows] into their gradient, in place.

    `lse`, `grad` of the losses, entropies and their gradients (float32) and `column` are [tokens];
    `uniform` is the smoothing of one row.
    """
    tokens, rows = logits.shape
    programs, numbers = tokens * triton.cdiv(rows, _COLUMNS), (scale, cap, z_loss, smoothing)
    constants = {"CAPPED": cap > 0.0, "ROWS": rows, "BLOCK": _COLUMNS}
    tensors = logits, lse, grad, entropy, grad_entropy, column
    _gradient[programs,](*tensors, *numbers, uniform, **constants)
