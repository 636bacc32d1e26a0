"""What contiguous shards need of each other: the state before a rank, and a convolution's rows.

The state behind rank r is S[r + 1] = T[r] S[r] + F[r]: F is what the rank's own tokens leave, T
what they make of a state that arrives, for each head a number (Mamba-2) or [dk, dk] (a delta net).
F and T of all ranks go round once, whatever the length, and backward the gradients of S.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def state_before(final: Tensor, transition: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the state [B, H, dk, dv] that arrives at this rank; collective, differentiable.

    Args:
        final: F of this rank, [B, H, dk, dv].
        transition: T, [B, H, dk, dk] or [B, H, 1, 1], of the same dtype.
        group: the ranks, in the order of the sequence.
    """
    state: Tensor = _StateBefore.apply(final, transition, group)
    return state


class _StateBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, final: Tensor, transition: Tensor, group: dist.ProcessGroup) -> Tensor:
        both = _gather(torch.cat([final.flatten(2), transition.flatten(2)], 2), group)
        finals, transitions = (
            part.unflatten(-1, x.shape[2:])
            for part, x in zip(
                both.split([final[0, 0].numel(), transition[0, 0].numel()], -1),
                (final, transition),
                strict=True,
            )
        )
        before = slice(group.rank())
        state = _passed_on(torch.zeros_like(final), finals[before], transitions[before])
        ctx.group = group
        ctx.save_for_backward(state, transitions)
        return state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        state, transitions = ctx.saved_tensors
        later = slice(ctx.group.rank() + 1, None)
        gradients = _gather(gradient, ctx.group)[later].flip(0)
        zero = torch.zeros_like(gradient)
        behind = _passed_on(zero, gradients, transitions.mT[later].flip(0))
        if transitions.shape[-1] == 1:
            return behind, (behind * state).sum((-2, -1), keepdim=True), None
        return behind, behind @ state.mT, None


def _passed_on(state: Tensor, added: Tensor, transitions: Tensor) -> Tensor:
    """Return what ranks [P, ...], one after the other, make of a state: T of each, and added."""
    for own, transition in zip(added, transitions, strict=True):
        is_number = transition.shape[-1] == 1
        state = own + (transition * state if is_number else transition @ state)
    return state


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [P, *x.shape]."""
    every = x.new_empty(group.size(), *x.shape)
    dist.all_gather_into_tensor(every.flatten(0, 1), x.contiguous(), group)
    return every


def tokens_before(x: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Return the last tokens [B, tokens, ...] of the rank before; collective, differentiable.

    Zero at the first rank. Equals `torch.cat([zeros, x of all ranks], 1)` there.

    Raises:
        ValueError: the ranks have fewer.
    """
    if x.shape[1] < tokens:
        raise ValueError(
            f"a convolution over {tokens + 1} tokens needs {tokens} of the rank before, which has "
            f"{x.shape[1]}: lower --context-parallel-size, or raise --seq-length"
        )
    before: Tensor = _Shift.apply(x[:, x.shape[1] - tokens :], 1, group)
    return before


class _Shift(torch.autograd.Function):
    """What the rank `distance` before has; zero where there is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, distance: int, group: dist.ProcessGroup) -> Tensor:
        ctx.arguments = distance, group
        to, source = group.rank() + distance, group.rank() - distance
        sizes = ([x.numel() * (r == peer) for r in range(group.size())] for peer in (to, source))
        sent, received = sizes
        arrived = x.new_zeros(x.numel() if any(received) else 0)
        leaving = x.reshape(-1)[: sum(sent)]
        dist.all_to_all_single(arrived, leaving, received, sent, group)
        return arrived.view(x.shape) if any(received) else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        distance, group = ctx.arguments
        return _Shift.apply(gradient.contiguous(), -distance, group), None, None
