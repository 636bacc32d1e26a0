"""The loops over chunks and the autograd node: losses, and gradients from logits made again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_burst.kernels.dtypes import accumulation_dtype, without_autocast
from megatron_burst.kernels.uncompiled import uncompiled
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk import InTorch, InTriton, Tokens, workspace
from megatron_burst.loss.chunk_size import Chunking
from megatron_burst.loss.kept import Kept
from megatron_burst.loss.products import LogitsGradient, OwnSum, WeightSum
from megatron_burst.loss.tokens import Chosen, Hidden, HiddenGradient, Spread, put, slices, take
from megatron_burst.loss.vocabulary import Targets, Vocabulary, losses

type _Tokens = tuple[Hidden, Tensor, Tensor, Tensor, *tuple[Tensor, ...]]
"""Hidden states, and [parts, tokens of a part] each: targets, log-sum-exps and gradients of the
losses, perhaps entropies and their gradients."""

_NEVER_MADE = 1e30
"""The log-sum-exp of a token that is left out: backward may take it to fill a part up with, with a
gradient of 0, and 0 times exp(logit) of a large one would be NaN."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all loops of a call share."""

    weight: Tensor  # [rows of this rank, d]
    call: Call
    vocabulary: Vocabulary
    spread: Spread
    chunking: Chunking

    def forward(
        self, states: Tensor, targets: Tensor, weights: Tensor | None, wants: tuple[bool, ...]
    ) -> tuple[Tensor, Kept | None]:
        """Return losses, log-sum-exps and perhaps entropies; losses of ignored targets are 0.

        [numbers, parts, tokens of a part] of `states` [tokens of a part, d]. With weights also the
        gradients of both inputs for losses so weighed.
        """
        wide, where = accumulation_dtype(states.dtype), self._locate(targets)
        made = states.new_zeros(2 + self.call.entropy, *targets.shape, dtype=wide)
        made[1] = _NEVER_MADE
        counted = where.counted.view(targets.shape)
        if weights is None:
            # Who asks for the largest logits asks for all tokens'.
            chosen = counted if self.call.on_best is None else torch.ones_like(counted)
            self._losses(self.spread.choose(states, chosen), targets, made)
            return made, None
        known = where.known.view(targets.shape)
        weights = weights.to(wide).masked_fill(~(counted & known), 0.0)
        weighed = self.spread.choose(states, weights != 0)
        others = self.spread.choose(states, counted & (weights == 0))
        kept = self._losses_and_gradients(weighed, targets, weights, made, wants)
        if weighed[1] is not None:
            self._losses(others, targets, made)
        return made, kept

    def _losses(self, chosen: Chosen, targets: Tensor, made: Tensor) -> None:
        """Fill in `made` for some tokens; the shards' statistics are combined for many chunks."""
        hidden, index = chosen
        if not len(hidden):
            return
        targets, results = take(targets, index), take(made, index)
        buffers = workspace(self.weight, self.chunking.tokens, self.call, slopes=False)
        for block in slices(len(hidden), self.chunking.combined // self.spread.parts):
            wanted = targets[:, block]
            of_shard = made.new_empty(self.call.statistics, *wanted.shape)
            for chunk, tokens in self.spread.gathered(hidden.of(block), self.chunking.tokens):
                of_chunk = self._statistics(buffers, tokens, wanted[:, chunk])
                of_shard[:, :, chunk] = of_chunk.view(-1, *wanted[:, chunk].shape)
            results[:, :, block] = self._combined(of_shard.flatten(1), wanted)
        put(made, index, results)

    def _losses_and_gradients(
        self,
        chosen: Chosen,
        targets: Tensor,
        weights: Tensor,
        made: Tensor,
        wants: tuple[bool, ...],
    ) -> Kept:
        """Do the same, and return the gradients.

        From the same logits, so the shards' statistics are combined for every chunk.
        """
        hidden, index = chosen
        targets, results, grads = take(targets, index), take(made, index), take(weights, index)
        size = self.chunking.tokens
        buffers = workspace(self.weight, size, self.call, slopes=True)
        d_hidden = HiddenGradient(self.spread, hidden, size) if wants[0] else None
        d_weight = OwnSum(self.weight) if wants[1] else None
        for chunk, tokens in self.spread.gathered(hidden, size):
            wanted, grad = targets[:, chunk], grads[:, chunk].reshape(-1)
            of_shard = self._statistics(buffers, tokens, wanted)
            results[:, :, chunk] = self._combined(of_shard, wanted)
            of_tokens = Tokens(tokens, results[1, :, chunk].reshape(-1), grad)
            of_vocabulary = self._locate(wanted), self.vocabulary.size
            gradient = buffers.gradient(of_tokens, *of_vocabulary, of_shard[0])
            _put(gradient, chunk, tokens, self.weight, d_hidden, d_weight)
        put(made, index, results)
        dh = None if d_hidden is None else d_hidden.result()
        return Kept(weights, dh, None if d_weight is None else d_weight.total)

    def _combined(self, of_shard: Tensor, targets: Tensor) -> Tensor:
        """Return what `forward` does, for these tokens, from the statistics of this rank's rows."""
        of_all = self.vocabulary.combine(of_shard, entropy=self.call.entropy)
        results = losses(of_all, self._locate(targets), self.vocabulary.size, self.call)
        return torch.stack(results).view(-1, *targets.shape)

    def _statistics(self, buffers: InTriton | InTorch, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return those of this rank's rows for a chunk; tell which logits are the largest."""
        statistics, best = buffers.statistics(tokens, self._locate(targets))
        if best is not None and self.call.on_best is not None:
            self.call.on_best(statistics[0].clone().view(targets.shape), best.view(targets.shape))
        return statistics

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
        for block in slices(self.weight.shape[0], rows):
            total = OwnSum(self.weight[block])
            self._add_up(tokens, block, self.chunking.tokens_of_rows, None, total)
            d_weight.add_rows(block, total.total)
        return d_weight.result()

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
        for chunk, hidden in self.spread.gathered(tokens[0], size):
            targets, lse, grad, *more = (x[:, chunk].reshape(-1) for x in tokens[1:])
            where = self._locate(targets)
            grad = self.vocabulary.check_gradient(grad, targets, where)
            of_tokens, whole = Tokens(hidden, lse, grad, *more), self.vocabulary.size
            gradient = buffers.gradient(of_tokens, where.in_rows(rows), whole)
            _put(gradient, chunk, hidden, self.weight, d_hidden, d_weight)

    def _locate(self, targets: Tensor) -> Targets:
        return self.vocabulary.locate(targets.reshape(-1), self.call.ignore_index)


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
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        make_head: Callable[[Tensor], Head],
    ) -> tuple[Tensor, ...]:
        """Return losses of targets' shape, and if asked for, entropies."""
        # Without the weight: hooks of saved tensors, as a checkpoint's, may let go of that.
        ctx.make_head, head = make_head, make_head(weight)
        weights = head.call.weights if head.chunking.keeps else None
        tokens = hidden.reshape(-1, hidden.shape[-1])
        wanted = targets.reshape(head.spread.parts, -1)
        weights = None if weights is None else weights.reshape(wanted.shape)
        (loss, *others), ctx.kept = head.forward(tokens, wanted, weights, ctx.needs_input_grad)
        if ctx.kept is not None:
            head.call.keeper.keep(ctx.kept)
        # Copies, not views of one tensor: what is returned may be changed in place.
        ctx.save_for_backward(hidden, weight, targets, *(x.clone() for x in others))
        return tuple(x.view(targets.shape).clone() for x in (loss, *others[1:]))

    @staticmethod
    @uncompiled
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`."""
        hidden, weight, targets, lse, *entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        head: Head = ctx.make_head(weight)
        sums = head.call.weight_sum(weight) if wants_weight else None
        targets = targets.reshape(lse.shape)
        ignored = targets == head.call.ignore_index
        given = [x.reshape(lse.shape).to(lse.dtype).masked_fill(ignored, 0.0) for x in grads]
        kept = ctx.kept
        factor = None if kept is None else head.call.keeper.factor(kept, given[0])
        if factor is not None:
            dh, dw = kept.times(factor, sums)
            return None if dh is None else dh.view(hidden.shape), dw, None, None
        weighed = torch.stack(given).count_nonzero(0) > 0  # NaN is not 0
        tokens, index = head.spread.choose(hidden.reshape(-1, hidden.shape[-1]), weighed)
        targets, lse, grad = (take(x, index) for x in (targets, lse, given[0]))
        of_entropy = (take(x, index) for x in (*entropy, *given[1:]))
        of_chunks = head.spread, tokens, head.chunking.tokens
        d_hidden = HiddenGradient(*of_chunks) if wants_hidden else None
        d_weight = head.gradients((tokens, targets, lse, grad, *of_entropy), d_hidden, sums)
        summed = None if d_hidden is None else d_hidden.result().view(hidden.shape)
        return summed, d_weight, None, None
