"""The autograd node: what is kept between forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.loss.loops import Head, LogitsAgain, gradients_again, loss_alone
from megatron_burst.loss.weight_sum import WeightSum


class LinearCrossEntropy(torch.autograd.Function):
    """Losses of all tokens; keeps their log-sum-exps, and computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        head: Head,
        weight_sum: Callable[[Tensor], WeightSum],
    ) -> Tensor:
        """Return losses of targets' shape."""
        ctx.head, ctx.weight_sum = head, weight_sum
        tokens = head.vocabulary.gather_tokens(hidden).reshape(-1, hidden.shape[-1])
        loss, lse = loss_alone(head, tokens, targets.reshape(-1))
        ctx.save_for_backward(hidden, weight, targets, lse)
        return loss.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`."""
        hidden, weight, targets, lse = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        vocabulary = ctx.head.vocabulary
        tokens = vocabulary.gather_tokens(hidden).reshape(-1, hidden.shape[-1])
        again = LogitsAgain(ctx.head, tokens, targets.reshape(-1), lse, grad.reshape(-1))
        d_hidden = torch.empty_like(tokens) if wants_hidden else None
        d_weight = gradients_again(
            again, d_hidden, ctx.weight_sum(weight) if wants_weight else None
        )
        if d_hidden is not None:
            d_hidden = vocabulary.sum_gradient(d_hidden).view(hidden.shape)
        return d_hidden, d_weight, None, None, None
