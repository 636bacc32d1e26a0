"""One call: its settings, the checks of its tensors, and the choice of its chunks."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_burst.loss.autograd import LinearCrossEntropy
from megatron_burst.loss.chunk_size import (
    MIB,
    Chunking,
    Sizes,
    of_tokens,
    within,
)
from megatron_burst.loss.loops import Head
from megatron_burst.loss.objective import Objective
from megatron_burst.loss.vocabulary import Vocabulary
from megatron_burst.loss.weight_sum import OwnSum, WeightSum

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_MB = 512


def _debug_chunking(chunking: Chunking) -> None:
    logger.debug("linear_cross_entropy: %s", chunking)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The settings of `linear_cross_entropy`, and what a framework may put in."""

    objective: Objective
    chunk_size: int | None = None
    memory_mb: float | None = None
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    weight_sum: Callable[[Tensor], WeightSum] = OwnSum  # for one backward
    on_chunking: Callable[[Chunking], None] = _debug_chunking

    def chunking(self, sizes: Sizes) -> Chunking:
        """Choose the chunks."""
        if self.chunk_size is not None:
            return of_tokens(sizes, self.chunk_size)
        memory_mb = DEFAULT_MEMORY_MB if self.memory_mb is None else self.memory_mb
        return within(sizes, int(memory_mb * MIB))


def apply(hidden: Tensor, weight: Tensor, targets: Tensor, call: Call) -> Tensor:
    """Do what `linear_cross_entropy` says, with the settings in one object."""
    alone = call.group is None or call.group.size() == 1
    group = None if alone else call.group
    vocabulary = Vocabulary(weight.shape[0], group, call.sequence_parallel)
    _check(hidden, weight, targets, vocabulary.ranks if call.sequence_parallel else 1)
    sizes = Sizes(
        tokens=targets.numel(),
        vocabulary=weight.shape[0],
        hidden=weight.shape[1],
        dtype=weight.dtype,
        ranks=vocabulary.ranks,
        statistics=call.objective.statistics,
        slopes=call.objective.logit_softcap is not None,
        sums_apart=weight.requires_grad and call.weight_sum(weight).apart,
    )
    chunking = call.chunking(sizes)
    call.on_chunking(chunking)
    head = Head(weight.detach(), call.objective, vocabulary, chunking)
    loss: Tensor = LinearCrossEntropy.apply(hidden, weight, targets, head, call.weight_sum)
    return loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, parts: int) -> None:
    if hidden.dtype != weight.dtype or not weight.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: give both in one floating dtype"
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}: they are "
            "[..., d] and [vocabulary, d]"
        )
    if targets.is_floating_point():
        raise ValueError(f"targets are {targets.dtype}, not integers")
    whole = list(hidden.shape[:-1])
    if parts > 1 and whole:
        whole[0] *= parts
    if list(targets.shape) != whole:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit hidden {tuple(hidden.shape)}"
            + (f" on each of {parts} ranks" if parts > 1 else "")
        )
