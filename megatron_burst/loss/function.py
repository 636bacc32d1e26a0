"""The public function, its checks of the tensors, and the same for a framework."""

from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.kernels.dtypes import as_autocast
from megatron_burst.kernels.in_triton import triton_kernels
from megatron_burst.kernels.inputs import check_group, check_local
from megatron_burst.kernels.uncompiled import uncompiled
from megatron_burst.loss.call import Call
from megatron_burst.loss.chunk_size import Sizes
from megatron_burst.loss.loops import Head, LinearCrossEntropy
from megatron_burst.loss.tokens import Spread, is_captured, is_unreadable
from megatron_burst.loss.vocabulary import Vocabulary

_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: Literal[False] = False,
    **settings: Any,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, entropy: Literal[True], **settings: Any
) -> tuple[Tensor, Tensor]: ...
@uncompiled  # type: ignore[misc]  # its settings are spelled out
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk_size: int | None = None,
    memory_mb: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    reduction: str = "none",
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Loss of every token from its hidden state, a chunk of tokens at a time.

    On one rank it equals, without the tensor of all logits:

        logits = F.linear(hidden, weight).float() * logit_scale
        if logit_softcap is not None:
            logits = logit_softcap * torch.tanh(logits / logit_softcap)
        logits, flat = logits.reshape(-1, len(weight)), targets.reshape(-1)
        loss = F.cross_entropy(logits, flat, reduction="none", ignore_index=ignore_index,
                               label_smoothing=label_smoothing)
        loss = loss + z_loss * logits.logsumexp(-1).square() * (flat != ignore_index)
        logs = logits.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1) * (flat != ignore_index)
        return loss.view(targets.shape), entropy.view(targets.shape)

    Without smoothing and z-loss -loss is the target's log-probability, with logit_scale = 1 / T at
    the temperature T. The entropy H has the gradient -p (log p + H) with respect to the logits.

    Ignored tokens are left out before any product is made, in backward those without a gradient.
    Gradients go to `hidden` and `weight`; none is filtered out. dW is summed in float32 and rounded
    once. Backward computes the logits of each chunk again; under a reduction the forward makes the
    gradients where memory allows, but in float16, and backward multiplies them by what it gets.
    Under torch.autocast both are used as they are, or where their dtypes differ in its dtype.

    Args:
        hidden: [..., d] in float32, bfloat16, float16 or float64.
        weight: [vocabulary, d] in the same dtype; over a group this rank's shard of rows, equal on
            all ranks and in order of the ranks.
        targets: [...], integers; the same on all ranks of the group.
        chunk_size: tokens a chunk; under sequence parallelism at least one of every rank.
        memory_mb: limit in MiB for all that is alive beside the inputs, the weight, their gradients
            and up to 32 bytes a token (48 for float64: loss, lse, target, gradient; 8 more where
            tokens are left out, 12 with entropies), so that no length is too great; chunks are as
            large as it allows. If neither this nor chunk_size is given, 512 or as much as chunks of
            2048 tokens take. Where the weight is narrower than float32 the sum of dW counts; if it
            takes more than half of the limit and leaves no room for such chunks, dW is made in
            blocks of rows, for which the logits are computed once more.
        ignore_index: targets that make no loss and no gradient.
        label_smoothing: as in F.cross_entropy, over the whole vocabulary also where it is spread
            (Megatron's own smooths over a rank's part, so its loss depends on the ranks).
        z_loss: weight of the squared log-sum-exp.
        logit_softcap: logits are bounded by this, smoothly.
        logit_scale: factor of the logits, before the soft cap.
        group: the ranks over which the vocabulary is spread; None is this rank alone.
        sequence_parallel: `hidden` is this rank's part of the first dimension; targets are whole.
        reduction: as in F.cross_entropy; the mean is over the targets that are not ignored.
        entropy: return the entropy of every token's distribution, too; not under a reduction.

    Returns:
        Losses of targets' shape in float32 (float64 for float64), or one, the same on all ranks of
        the group; with `entropy` a pair of both. A target outside the vocabulary has the loss 1e30,
        which a mask of 0 makes 0. If its loss counts after all, the gradients are NaN; on the CPU
        backward raises a ValueError.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit, another number of rows or other
            targets on ranks of the group, both chunk_size and memory_mb, or a memory limit too
            small for one token.
        TypeError: a tensor is a DTensor, a number a tensor that asks for a gradient, or the group
            none.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction must be none, sum or mean, got {reduction!r}")
    if entropy and reduction != "none":
        raise ValueError(f"entropy is of every token: reduction must be none, got {reduction!r}")
    check_group(group)
    if group is not None:
        _compare(weight, targets, group)
    counted = targets.long() != ignore_index  # as of 8 bits -100 is 156
    number = counted.sum() if reduction == "mean" else 1
    call = Call(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        entropy=entropy,
        chunk_size=chunk_size,
        memory_mb=memory_mb,
        group=group,
        sequence_parallel=sequence_parallel,
        weights=None if reduction == "none" else counted.float() / number,
    )
    if hidden.dtype != weight.dtype:
        hidden, weight = as_autocast(hidden, weight)
    losses, *entropies = apply(hidden, weight, targets, call)
    if reduction != "none":
        return losses.sum() / number
    return (losses, entropies[0]) if entropy else losses


def apply(hidden: Tensor, weight: Tensor, targets: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Do what `linear_cross_entropy` says, with the settings in one object: losses, entropies."""
    group = None if call.group is None or call.group.size() == 1 else call.group
    vocabulary = Vocabulary(weight.shape[0], group)
    spread = Spread(group, vocabulary.ranks if call.sequence_parallel else 1)
    _check(hidden, weight, targets, spread.parts)
    targets = targets.long()
    sums = call.weight_sum(weight) if weight.requires_grad else None
    # float16 has too little room below 1 without a loss scale, which the backward brings; of
    # entropies' weights nothing is known.
    keeps = call.weights is not None and weight.dtype != torch.float16 and targets.numel() > 0
    keeps &= not call.entropy
    keeps &= torch.is_grad_enabled() and (hidden.requires_grad or sums is not None)
    keeps = keeps and not is_captured(weight) and call.keeper.takes()
    sizes = Sizes(
        tokens=targets.numel(),
        vocabulary=weight.shape[0],
        hidden=weight.shape[1],
        dtype=weight.dtype,
        ranks=vocabulary.ranks,
        parts=spread.parts,
        statistics=call.statistics,
        beside=(call.logit_softcap is not None) + call.entropy,
        fused=triton_kernels(weight, "fused_loss") is not None,
        sums_apart=sums is not None and sums.apart,
        kept_apart=sums is not None and sums.kept_apart if keeps else None,
    )
    make_head = partial(
        Head, call=call, vocabulary=vocabulary, spread=spread, chunking=call.chunking(sizes)
    )
    made: tuple[Tensor, ...] = LinearCrossEntropy.apply(hidden, weight, targets, make_head)
    return made


def _compare(weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> None:
    """Compare the sizes by which a rank places the shards of the others, and the sums of targets.

    The host waits.
    """
    if is_unreadable(weight):
        return
    given = weight.new_tensor([weight.shape[0], targets.numel(), 0], dtype=torch.int64)
    given[2] = targets.sum()
    of_ranks = given.new_empty(group.size() * 3)
    dist.all_gather_into_tensor(of_ranks, given, group=group)
    if (of_ranks.view(-1, 3) != given).any():
        rows, tokens, sums = of_ranks.view(-1, 3).t().tolist()
        raise ValueError(
            f"the ranks of the group give {rows} rows of the weight and {tokens} targets, of which "
            f"the sums are {sums}: give the same targets, as ranks do that share a vocabulary, not "
            "a sequence, and pad the vocabulary, or the tokens, to as many on every rank"
        )


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, parts: int) -> None:
    check_local(hidden=hidden, weight=weight, targets=targets)
    if not hidden.device == weight.device == targets.device:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight.device}, targets on "
            f"{targets.device}: give all on one device"
        )
    if hidden.dtype != weight.dtype or weight.dtype not in _DTYPES:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: give both in one floating dtype "
            "of 16 bits or more"
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} does not fit weight {tuple(weight.shape)}: they are "
            "[..., d] and [vocabulary, d]"
        )
    if 0 in weight.shape:
        raise ValueError(f"the weight {tuple(weight.shape)} is empty")
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}, not integers")
    whole = list(hidden.shape[:-1])
    if parts > 1 and whole:
        whole[0] *= parts
    if list(targets.shape) != whole:
        raise ValueError(
            f"targets {tuple(targets.shape)} do not fit hidden {tuple(hidden.shape)}"
            + (f" on each of {parts} ranks" if parts > 1 else "")
        )
