"""The loss from the logits of all tokens, in float64 by autograd. Shares no code with ours."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle import relative_error

# Every objective that the library has, alone and together.
OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignore index": {"ignore_index": 3},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "soft cap": {"logit_softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "entropy": {"entropy": True, "logit_scale": 0.8},
    "all with entropy": {"entropy": True, "label_smoothing": 0.2, "z_loss": 1e-3}
    | {"logit_softcap": 5.0, "logit_scale": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "logit_softcap": 5.0, "logit_scale": 2.0},
}


class Result(NamedTuple):
    loss: Tensor
    d_hidden: Tensor
    d_weight: Tensor


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    grad: Tensor  # of the losses


def make_case(
    tokens: tuple[int, ...] = (3, 7),
    vocabulary: int = 48,
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    ignore_index: int = -100,
) -> Case:
    """Random tensors; a few targets are ignored. The logits' standard deviation is 2."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*tokens, size, generator=generator)
    weight = torch.randn(vocabulary, size, generator=generator) * 2 / size**0.5
    targets = torch.randint(0, vocabulary, tokens, generator=generator)
    targets.view(-1)[1::5] = ignore_index
    grad = torch.randn(tokens, generator=generator)
    return Case(hidden.to(dtype), weight.to(dtype), targets, grad)


def from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
) -> Tensor:
    """The slow code of the library's docstring; losses and entropies in one tensor."""
    logits = logits * logit_scale
    if logit_softcap is not None:
        logits = logit_softcap * torch.tanh(logits / logit_softcap)
    logits, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    loss = F.cross_entropy(
        logits, flat, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    loss = loss + z_loss * logits.logsumexp(-1).square() * (flat != ignore_index)
    loss = loss.view(targets.shape)
    if not entropy:
        return loss
    logs = logits.log_softmax(-1)
    of_tokens = -(logs.exp() * logs).sum(-1) * (flat != ignore_index)
    return torch.stack([loss, of_tokens.view(targets.shape)])


def in_one(made: Tensor | tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and their gradients; with entropies, which get other gradients, one tensor of each."""
    made = made if isinstance(made, Tensor) else torch.stack(made)
    grad = grad.to(made.dtype)
    return made, grad if made.dim() == grad.dim() else torch.stack([grad, 0.7 * grad.flip(0)])


def oracle(case: Case, grad: Tensor | None = None, **objective: Any) -> Result:
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    loss = from_logits(F.linear(hidden, weight), case.targets, **objective)
    loss, grad = in_one(loss, case.grad if grad is None else grad)
    return Result(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad))


def ours(case: Case, grad: Tensor | None = None, **arguments: Any) -> Result:
    from megatron_burst import linear_cross_entropy

    hidden, weight = (x.detach().clone().requires_grad_() for x in (case.hidden, case.weight))
    loss = linear_cross_entropy(hidden, weight, case.targets, **arguments)
    loss, grad = in_one(loss, case.grad if grad is None else grad)
    return Result(loss.detach(), *torch.autograd.grad(loss, (hidden, weight), grad))


def share(case: Case, rank: int, ranks: int, parts: bool) -> tuple[Tensor, Tensor]:
    """A rank's hidden states, of a part of the tokens or of all, and its rows of the weight."""
    hidden = case.hidden.chunk(ranks)[rank] if parts else case.hidden
    weight = case.weight.chunk(ranks)[rank]
    return hidden.clone().requires_grad_(), weight.clone().requires_grad_()


def together(results: Sequence[Result], parts: bool) -> Result:
    """The whole result; every rank must have the same losses."""
    first = results[0]
    assert all(torch.equal(r.loss, first.loss) for r in results)
    assert parts or all(torch.equal(r.d_hidden, first.d_hidden) for r in results)
    d_hidden = torch.cat([r.d_hidden for r in results]) if parts else first.d_hidden
    return Result(first.loss, d_hidden, torch.cat([r.d_weight for r in results]))


def errors(found: Result, expected: Result) -> list[float]:
    return [relative_error(f, e) for f, e in zip(found, expected, strict=True)]
