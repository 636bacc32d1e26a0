"""A function of rows, of some of them at a time: what lives inside of it is one chunk's.

A checkpoint around each chunk, as Megatron's are, would run the hook of a weight once a chunk, and
Megatron's data parallelism would reduce the gradient after the first. Here one autograd function
holds all chunks, so that a weight's hook runs once.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.kernels.dtypes import accumulation_dtype


def is_in_backward() -> bool:
    """Whether this is called inside of a backward, as the replay of a checkpoint is."""
    return torch._C._current_graph_task_id() != -1


def unmade(like: Tensor) -> Tensor:
    """Return what stands in for a tensor nobody reads: no memory, and NaN if it is read after all.

    Of the same shape and dtype.
    """
    return like.new_full((), math.nan).expand(like.shape)


def in_row_chunks(
    hidden: Tensor,
    run: Callable[[Tensor], Tensor],
    rows: int,
    weights: Iterable[Tensor],
    *,
    is_idle: bool = False,
) -> Tensor:
    """Return `run(hidden)`, of some rows at a time; the backward computes each chunk again.

    Args:
        hidden: [rows, ...].
        run: a function of these and of `weights` in which no row depends on another.
        rows: of a chunk.
        weights: what is differentiated beside `hidden`; of the others there is no gradient.
        is_idle: whether nobody reads what it returns; then it is NaN, of `hidden`'s shape.
    """
    wanted = [weight for weight in weights if weight.requires_grad]
    return _InChunks.apply(hidden, run, rows, is_idle, *wanted)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        run: Callable[[Tensor], Tensor],
        rows: int,
        is_idle: bool,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.run, ctx.rows, ctx.weights = run, rows, weights
        if is_idle:
            return unmade(hidden)
        pieces = hidden.split(rows)
        first = run(pieces[0])
        if len(pieces) == 1:
            return first
        output = first.new_empty(len(hidden), *first.shape[1:])
        parts = output.split(rows)
        parts[0].copy_(first)
        del first
        for part, piece in zip(parts[1:], pieces[1:], strict=True):
            part.copy_(run(piece))
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        asks = ctx.needs_input_grad[0]
        d_hidden = torch.empty_like(hidden) if asks else None
        sums = [_WeightGradient(weight) for weight in ctx.weights]
        for start in range(0, len(hidden), ctx.rows):
            rows = slice(start, start + ctx.rows)
            piece = hidden[rows].detach().requires_grad_(asks)
            with torch.enable_grad():
                output = ctx.run(piece)
            wanted = [piece] * asks + [*ctx.weights]
            gradients = [*torch.autograd.grad(output, wanted, d_output[rows], allow_unused=True)]
            if d_hidden is not None:
                d_hidden[rows] = gradients.pop(0)
            for each, gradient in zip(sums, gradients, strict=True):
                each.add(gradient)
        return d_hidden, None, None, None, *(each.result() for each in sums)


class _WeightGradient:
    """The gradient of one weight, summed over chunks in float32 (float64 for float64).

    Under gradient accumulation fusion the layer has added a chunk's to `main_grad` by itself, set
    `grad_added_to_main_grad`, and returned a tensor without meaning, of which the last goes on.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._sum: Tensor | None = None
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = False

    def add(self, gradient: Tensor | None) -> None:
        """Add a chunk's gradient; None where the weight has no part in the output."""
        if gradient is None:
            return
        if getattr(self._weight, "grad_added_to_main_grad", False):
            self._sum = gradient
        elif self._sum is None:
            self._sum = gradient.to(accumulation_dtype(gradient.dtype), copy=True)
        else:
            self._sum += gradient

    def result(self) -> Tensor | None:
        """Return what the weight's hook is given."""
        return None if self._sum is None else self._sum.to(self._weight.dtype)
