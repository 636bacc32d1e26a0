"""What contiguous shards need of each other: the state before a rank, and a convolution's rows.

The state behind rank r is S[r + 1] = T[r] S[r] + F[r]: F is what the rank's own tokens leave, T
what they make of a state that arrives, for each head a number (Mamba-2) or [dk, dk] (a delta net).
F and T of all ranks go round once, whatever the length, and backward the gradients of S.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def arriving(finals: Sequence[Tensor], transitions: Sequence[Tensor]) -> Tensor:
    """Return the states before every rank and behind the last, [P + 1, ..., dk, dv].

    Args:
        finals: F of each rank, [..., dk, dv].
        transitions: T of each, [..., dk, dk], or [..., 1, 1] where it is a number.
    """
    states = [torch.zeros_like(finals[0])]
    for final, transition in zip(finals, transitions, strict=True):
        states.append(final + _times(transition, states[-1]))
    return torch.stack(states)


def departing(gradients: Sequence[Tensor], transitions: Sequence[Tensor]) -> Tensor:
    """Return the gradients of the same states, by what each rank itself has for the one before it.

    [P + 1, ..., dk, dv]; zero behind the last.
    """
    states = [torch.zeros_like(gradients[0])]
    for gradient, transition in zip(reversed(gradients), reversed(transitions), strict=True):
        states.append(gradient + _times(transition.mT, states[-1]))
    return torch.stack(states[::-1])


def _times(transition: Tensor, state: Tensor) -> Tensor:
    return transition * state if transition.shape[-1] == 1 else transition @ state


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
        state = arriving([*finals], [*transitions])[group.rank()]
        ctx.group = group
        ctx.save_for_backward(state, transitions)
        return state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        state, transitions = ctx.saved_tensors
        gradients = _gather(gradient, ctx.group)
        behind = departing([*gradients], [*transitions])[ctx.group.rank() + 1]
        if transitions.shape[-1] == 1:
            return behind, (behind * state).sum((-2, -1), keepdim=True), None
        return behind, behind @ state.mT, None


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
