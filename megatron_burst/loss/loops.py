"""The loops over chunks: losses alone, and gradients from logits computed again."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.loss.chunk import Workspace
from megatron_burst.loss.chunk_size import Chunking
from megatron_burst.loss.objective import Objective
from megatron_burst.loss.products import LogitsGradient
from megatron_burst.loss.vocabulary import Targets, Vocabulary, losses
from megatron_burst.loss.weight_sum import OwnSum, WeightSum


@dataclass(frozen=True, slots=True)
class Head:
    """What all loops of a call share."""

    weight: Tensor  # [rows of this rank, d]
    objective: Objective
    vocabulary: Vocabulary
    chunking: Chunking

    def locate(self, targets: Tensor) -> Targets:
        """Find the targets [tokens] in this rank's shard."""
        return self.vocabulary.locate(targets.long(), self.objective.ignore_index)

    def gradient(self, grad: Tensor, targets: Tensor, where: Targets) -> Tensor:
        """Return the gradient of the losses [tokens] in the dtype of sums, 0 for ignored targets.

        NaN for targets outside the vocabulary whose losses count; on the CPU a ValueError.
        """
        grad = grad.to(accumulation_dtype(self.weight.dtype)).masked_fill(~where.counted, 0.0)
        return self.vocabulary.check_gradient(grad, targets, where)


def slices(total: int, size: int) -> Iterator[slice]:
    """Cut [0, total) into slices of `size`; the last may be shorter."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def loss_alone(head: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and log-sum-exps; the shards' statistics are combined for many chunks."""
    workspace = Workspace(head.weight, head.chunking.tokens, head.objective, slopes=False)
    wide = accumulation_dtype(hidden.dtype)
    loss, lse = (hidden.new_empty(hidden.shape[0], dtype=wide) for _ in range(2))
    for block in slices(hidden.shape[0], head.chunking.combined):
        tokens, wanted = hidden[block], targets[block]
        of_shard = loss.new_empty(head.objective.statistics, tokens.shape[0])
        for chunk in slices(tokens.shape[0], head.chunking.tokens):
            logits = workspace.logits(tokens[chunk], head.weight)
            of_shard[:, chunk] = workspace.statistics(logits, head.locate(wanted[chunk]))
        loss[block], lse[block] = losses(
            head.vocabulary.combine(of_shard),
            head.locate(wanted),
            head.vocabulary.size,
            head.objective,
        )
    return loss, lse


@dataclass(frozen=True, slots=True)
class LogitsAgain:
    """Computes logits a second time, and their gradients."""

    head: Head
    hidden: Tensor  # [tokens, d]
    targets: Tensor  # [tokens]
    lse: Tensor  # [tokens]
    grad: Tensor  # [tokens], of the losses

    def gradients(self, rows: slice, tokens: int) -> Iterator[tuple[slice, LogitsGradient]]:
        """Yield the gradient of some columns of the logits, chunk by chunk in the same memory."""
        weight = self.head.weight[rows]
        workspace = Workspace(weight, tokens, self.head.objective, slopes=True)
        for chunk in slices(self.hidden.shape[0], tokens):
            logits = workspace.logits(self.hidden[chunk], weight)
            where = self.head.locate(self.targets[chunk])
            grad = self.head.gradient(self.grad[chunk], self.targets[chunk], where)
            yield (
                chunk,
                workspace.gradient(
                    logits.sub_(self.lse[chunk, None]).exp_(),
                    self.lse[chunk],
                    where.in_rows(rows),
                    grad,
                    self.head.vocabulary.size,
                ),
            )


def gradients_again(
    again: LogitsAgain, d_hidden: Tensor | None, d_weight: WeightSum | None
) -> Tensor | None:
    """Fill `d_hidden` and return the gradient of the weight, from logits computed again.

    Where the memory limit has no room for the sum of all of dW, dW is made in blocks of rows
    afterwards, and the logits are computed a third time.
    """
    weight, rows = again.head.weight, again.head.chunking.rows
    if d_weight is None or rows is None:
        _all_rows(again, d_hidden, d_weight)
        return None if d_weight is None else d_weight.result()
    if d_hidden is not None:
        _all_rows(again, d_hidden, None)
    result = torch.empty_like(weight)
    for block in slices(weight.shape[0], rows):
        result[block] = _some_rows(again, block)
    return result


def _all_rows(again: LogitsAgain, d_hidden: Tensor | None, d_weight: WeightSum | None) -> None:
    weight = again.head.weight
    every = slice(0, weight.shape[0])
    for chunk, gradient in again.gradients(every, again.head.chunking.tokens):
        if d_hidden is not None:
            torch.mm(gradient.narrow, weight, out=d_hidden[chunk])
        if d_weight is not None:
            d_weight.add_product(gradient, again.hidden[chunk])


def _some_rows(again: LogitsAgain, rows: slice) -> Tensor:
    total = OwnSum(again.head.weight[rows])
    for chunk, gradient in again.gradients(rows, again.head.chunking.tokens_of_rows):
        total.add_product(gradient, again.hidden[chunk])
    return total.total
