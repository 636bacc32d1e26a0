"""The loops over chunks and the autograd node: losses, and gradients from logits made again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.kernels.dtypes import accumulation_dtype, without_autocast
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk import InTorch, InTriton, workspace
from megatron_burst.loss.chunk_size import Chunking
from megatron_burst.loss.kept import Kept
from megatron_burst.loss.products import LogitsGradient, OwnSum, WeightSum
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
                found = self._statistics(buffers, tokens, wanted[:, chunk])
                of_shard[:, :, chunk] = found.view(-1, *wanted[:, chunk].shape)
            of_all, where = self.vocabulary.combine(of_shard.flatten(1)), self._locate(wanted)
            made = losses(of_all, where, self.vocabulary.size, self.call)
            loss[:, block], lse[:, block] = (x.view(wanted.shape) for x in made)
        return loss, lse

    def losses_and_gradients(
        self, hidden: Tensor, targets: Tensor, weights: Tensor, wants: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor, Kept]:
        """Return losses, log-sum-exps, and the gradients of both inputs for losses so weighed.

        From the same logits, so the shards' statistics are combined for every chunk.
        """
        where = self._locate(targets)
        counts = (where.counted & where.known).view(targets.shape)
        weights = weights.to(accumulation_dtype(hidden.dtype)).masked_fill(~counts, 0.0)
        loss, lse = (torch.empty_like(weights) for _ in range(2))
        buffers = workspace(self.weight, self.chunking.tokens, self.call, slopes=True)
        size = self.chunking.tokens // self.spread.parts
        d_hidden = HiddenGradient(self.spread, hidden, size) if wants[0] else None
        d_weight = OwnSum(self.weight) if wants[1] else None
        for chunk, tokens in self._chunks(hidden, self.chunking.tokens):
            wanted, grad = targets[:, chunk], weights[:, chunk].reshape(-1)
            where, found = self._locate(wanted), self._statistics(buffers, tokens, wanted)
            made = losses(self.vocabulary.combine(found), where, self.vocabulary.size, self.call)
            loss[:, chunk], lse[:, chunk] = (x.view(wanted.shape) for x in made)
            of_tokens, whole = (tokens, made[1], grad), self.vocabulary.size
            gradient = buffers.gradient(of_tokens, where, whole, found[0])
            _put(gradient, chunk, tokens, self.weight, d_hidden, d_weight)
        dh = None if d_hidden is None else d_hidden.result()
        return loss, lse, Kept(weights, dh, None if d_weight is None else d_weight.total)

    def _statistics(self, buffers: InTriton | InTorch, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return those of this rank's rows for a chunk; tell which logits are the largest."""
        found, best = buffers.statistics(tokens, self._locate(targets))
        if best is not None and self.call.on_best is not None:
            self.call.on_best(found[0].clone().view(targets.shape), best.view(targets.shape))
        return found

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
            _put(gradient, chunk, hidden, self.weight, d_hidden, d_weight)

    def _chunks(self, hidden: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        return self.spread.gathered(hidden, size // self.spread.parts)

    def _locate(self, targets: Tensor) -> Targets:
        return self.vocabulary.locate(targets.reshape(-1).long(), self.call.ignore_index)


def _put(
    gradient: LogitsGradient,
    chunk: slice,
    hidden: Tensor,
    weight: Tensor,
    d_hidden: HiddenGradient | None,
    d_weight: WeightSum | None,
) -> None:
    """Make of a chunk's logits' gradient those of the inputs."""
    if d_weight is not None:  # first: the last chunk's dh is under way
        d_weight.add_product(gradient, hidden)
    if d_hidden is not None:
        d_hidden.put(chunk, gradient.narrow, weight)


class LinearCrossEntropy(torch.autograd.Function):
    """Losses of all tokens; keeps their log-sum-exps, to compute the logits again.

    Or the gradients, where the weights of the losses are known but for a factor.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: Head) -> Tensor:
        """Return losses of targets' shape."""
        ctx.head, ctx.kept, weights = head, None, head.call.weights
        tokens, rows = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(head.spread.parts, -1)
        if head.chunking.keeps and weights is not None:
            wants = ctx.needs_input_grad
            made = head.losses_and_gradients(tokens, rows, weights.reshape(rows.shape), wants)
            loss, lse, ctx.kept = made
            head.call.keeper.keep(ctx.kept)
        else:
            loss, lse = head.losses(tokens, rows)
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
        grad, sums = grad.reshape(lse.shape), head.call.weight_sum(weight) if wants_weight else None
        if (kept := ctx.kept) is not None:
            ctx.kept, ignored = None, targets.reshape(lse.shape) == head.call.ignore_index
            factor = head.call.keeper.factor(kept, grad.masked_fill(ignored, 0.0))
            if factor is not None:
                dh, dw = kept.times(factor, sums)
                return None if dh is None else dh.view(hidden.shape), dw, None, None
            del kept  # its memory
        tokens = hidden.reshape(-1, hidden.shape[-1])
        size = head.chunking.tokens // head.spread.parts
        d_hidden = HiddenGradient(head.spread, tokens, size) if wants_hidden else None
        d_weight = head.gradients((tokens, targets.reshape(lse.shape), lse, grad), d_hidden, sums)
        summed = None if d_hidden is None else d_hidden.result().view(hidden.shape)
        return summed, d_weight, None, None
