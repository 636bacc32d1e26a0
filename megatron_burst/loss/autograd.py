"""The autograd node: what is kept between forward and backward, and which gradients are used."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.loss.expected import expected_factor, read_later
from megatron_burst.loss.loops import (
    Head,
    LogitsAgain,
    gradients_again,
    loss_alone,
    loss_and_gradients,
)
from megatron_burst.loss.weight_sum import WeightSum


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Gradients made in forward: right if that of the losses is `expected` times one factor."""

    expected: Tensor  # [tokens]
    d_hidden: Tensor  # [this rank's tokens, d]
    d_weight: Tensor | None  # [rows, d] in the dtype of sums

    def scaled(self, grad: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Turn them, in place, into the gradients for `grad`; None if no factor does."""
        factor, matches = expected_factor(grad, self.expected)
        is_right = read_later(matches)
        self.d_hidden.mul_(factor)
        if self.d_weight is not None:
            self.d_weight.mul_(factor)
        return (self.d_hidden, self.d_weight) if is_right() else None


class LinearCrossEntropy(torch.autograd.Function):
    """Losses of all tokens; keeps their log-sum-exps, and gradients where these are made early."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_mask: Tensor | None,
        head: Head,
        weight_sum: Callable[[Tensor], WeightSum],
        on_mismatch: Callable[[], None],
    ) -> Tensor:
        """Return losses of targets' shape."""
        ctx.head, ctx.weight_sum, ctx.on_mismatch = head, weight_sum, on_mismatch
        ctx.unscaled = None
        tokens = head.vocabulary.gather_tokens(hidden).reshape(-1, hidden.shape[-1])
        flat = targets.reshape(-1)
        if head.chunking.in_forward:
            expected = flat.ne(head.objective.ignore_index).to(accumulation_dtype(hidden.dtype))
            if loss_mask is not None:
                expected *= loss_mask.reshape(-1)
            loss, lse, d_hidden, d_weight = loss_and_gradients(
                head, tokens, flat, expected, with_weight=ctx.needs_input_grad[1]
            )
            d_hidden = head.vocabulary.sum_gradient(d_hidden)
            ctx.unscaled = Unscaled(expected, d_hidden, d_weight)
        else:
            loss, lse = loss_alone(head, tokens, flat)
        ctx.save_for_backward(hidden, weight, targets, lse)
        return loss.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`."""
        hidden, weight, targets, lse = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        d_weight = ctx.weight_sum(weight) if wants_weight else None
        vocabulary, flat, grad = ctx.head.vocabulary, targets.reshape(-1), grad.reshape(-1)
        unscaled, ctx.unscaled = ctx.unscaled, None  # scaled in place: good for one backward
        if unscaled is not None:
            found = unscaled.scaled(ctx.head.gradient(grad, flat, ctx.head.locate(flat)))
            if found is not None:
                d_hidden, product = found
                return d_hidden.view(hidden.shape), _finish(d_weight, product), *[None] * 5
            del unscaled  # its memory is needed
            ctx.on_mismatch()
        tokens = vocabulary.gather_tokens(hidden).reshape(-1, hidden.shape[-1])
        d_hidden = torch.empty_like(tokens) if wants_hidden else None
        result = gradients_again(LogitsAgain(ctx.head, tokens, flat, lse, grad), d_hidden, d_weight)
        if d_hidden is not None:
            d_hidden = vocabulary.sum_gradient(d_hidden).view(hidden.shape)
        return d_hidden, result, *[None] * 5


def _finish(d_weight: WeightSum | None, product: Tensor | None) -> Tensor | None:
    if d_weight is None or product is None:
        return None
    d_weight.add(product)
    return d_weight.result()
