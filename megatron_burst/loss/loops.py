"""The loops over chunks and the autograd node: losses, and gradients from logits made again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.kernels.dtypes import accumulation_dtype, without_autocast
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk import workspace
from megatron_burst.loss.chunk_size import Chunking
from megatron_burst.loss.products import OwnSum, WeightSum
from megatron_burst.loss.tokens import HiddenGradient, Spread, slices
from megatron_burst.loss.vocabulary import Targets, Vocabulary, losses

type _Tokens = tuple[Tensor, Tensor, Tensor, Tensor]
"""Hidden states [tokens of a part, d], and [parts, tokens of a part] each: targets, log-sum-exps
and gradients of the losses."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all loops of a call share."""

    weight: Tensor  # [rows of this rank, d]
    call: Call
    vocabulary: Vocabulary
    spread: Spread
    chunking: Chunking

    def losses(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and log-sum-exps; the shards' statistics are combined for many chunks."""
        buffers = workspace(self.weight, self.chunking.tokens, self.call, slopes=False)
        wide = accumulation_dtype(hidden.dtype)
        loss, lse = (hidden.new_empty(targets.shape, dtype=wide) for _ in range(2))
        for block in slices(hidden.shape[0], self.chunking.combined // self.spread.parts):
            wanted = targets[:, block]
            of_shard = loss.new_empty(self.call.statistics, *wanted.shape)
            for chunk, tokens in self._chunks(hidden[block], self.chunking.tokens):
                targets_of, shape = self._locate(wanted[:, chunk]), wanted[:, chunk].shape
                found, best = buffers.statistics(tokens, targets_of)
                of_shard[:, :, chunk] = found.view(-1, *shape)
                if best is not None and self.call.on_best is not None:
                    self.call.on_best(found[0].clone().view(shape), best.view(shape))
            of_all, where = self.vocabulary.combine(of_shard.flatten(1)), self._locate(wanted)
            made = losses(of_all, where, self.vocabulary.size, self.call)
            loss[:, block], lse[:, block] = (x.view(wanted.shape) for x in made)
        return loss, lse

    def gradients(
        self, tokens: _Tokens, d_hidden: HiddenGradient | None, d_weight: WeightSum | None
    ) -> Tensor | None:
        """Fill `d_hidden` and return the gradient of the weight, from logits computed again.

        Where the memory limit has no room for the sum of all of dW, dW is made in blocks of rows
        afterwards, and the logits are computed a third time.
        """
        every, rows = slice(0, self.weight.shape[0]), self.chunking.rows
        if d_weight is None or rows is None:
            self._add_up(tokens, every, self.chunking.tokens, d_hidden, d_weight)
            return None if d_weight is None else d_weight.result()
        if d_hidden is not None:
            self._add_up(tokens, every, self.chunking.tokens, d_hidden, None)
        result = torch.empty_like(self.weight)
        for block in slices(self.weight.shape[0], rows):
            total = OwnSum(self.weight[block])
            self._add_up(tokens, block, self.chunking.tokens_of_rows, None, total)
            result[block] = total.total
        return result

    def _add_up(
        self,
        tokens: _Tokens,
        rows: slice,
        size: int,
        d_hidden: HiddenGradient | None,
        d_weight: WeightSum | None,
    ) -> None:
        """Make the gradient of these columns of the logits, in chunks, and what comes of it."""
        buffers = workspace(self.weight[rows], size, self.call, slopes=True)
        for chunk, hidden in self._chunks(tokens[0], size):
            targets, lse, grad = (x[:, chunk].reshape(-1) for x in tokens[1:])
            where = self._locate(targets)
            grad = grad.to(lse.dtype).masked_fill(~where.counted, 0.0)
            grad = self.vocabulary.check_gradient(grad, targets, where)
            of_tokens, whole = (hidden, lse, grad), self.vocabulary.size
            gradient = buffers.gradient(of_tokens, where.in_rows(rows), whole)
            if d_weight is not None:  # first: the last chunk's dh is under way
                d_weight.add_product(gradient, hidden)
            if d_hidden is not None:
                d_hidden.put(chunk, gradient.narrow, self.weight)

    def _chunks(self, hidden: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        return self.spread.gathered(hidden, size // self.spread.parts)

    def _locate(self, targets: Tensor) -> Targets:
        return self.vocabulary.locate(targets.reshape(-1).long(), self.call.ignore_index)


class LinearCrossEntropy(torch.autograd.Function):
    """Losses of all tokens; keeps their log-sum-exps, and computes the logits again."""

    @staticmethod
    @without_autocast
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        """Return losses of targets' shape."""
        ctx.head = head
        tokens = hidden.reshape(-1, hidden.shape[-1])
        loss, lse = head.losses(tokens, targets.reshape(head.spread.parts, -1))
        ctx.save_for_backward(hidden, weight, targets, lse)
        return loss.view(targets.shape)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`."""
        hidden, weight, targets, lse = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        head: Head = ctx.head
        tokens = hidden.reshape(-1, hidden.shape[-1])
        size = head.chunking.tokens // head.spread.parts
        d_hidden = HiddenGradient(head.spread, tokens, size) if wants_hidden else None
        d_weight = head.gradients(
            (tokens, targets.reshape(lse.shape), lse, grad.reshape(lse.shape)),
            d_hidden,
            head.call.weight_sum(weight) if wants_weight else None,
        )
        summed = None if d_hidden is None else d_hidden.result().view(hidden.shape)
        return summed, d_weight, None, None
