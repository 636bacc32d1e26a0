"""Calls attention beside its unsharded reference, and says where what comes of it is wrong."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.kv import Latents
from megatron_burst.config import ZIGZAGS, BurstConfig, GradDtype, LayoutName
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.reference.dense import (
    MARGIN,
    Expected,
    Reference,
    Spread,
    Visibility,
    megatrons_positions,
)
from megatron_burst.reference.verify_latents import LatentGradients

_STRETCH = 32  # tokens whose errors are one number: few enough for a border that is one off
_MEGATRONS = *ZIGZAGS, LayoutName.BALANCED  # of BALANCED what comes without a layout


class VerificationError(RuntimeError):
    """Attention is not what dense attention is; the message says which tensor and where."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One tensor of a rank, at the stretch of tokens whose error is the largest part of allowed.

    Both are norms over a stretch and a head, as parts of the norm of what is expected there, or of
    the rank's root mean square where that is larger.
    """

    tensor: str
    error: float
    allowed: float
    rank: int
    where: str = ""  # which heads and tokens are wrong; nothing where all is right

    @property
    def share(self) -> float:
        """How much of what is allowed the error takes."""
        if not self.error:
            return 0.0
        return self.error / self.allowed if self.allowed else float("inf")

    def __str__(self) -> str:
        return (
            f"{self.tensor} on rank {self.rank}: error {self.error:.1e} where {self.allowed:.1e} "
            f"is allowed, {self.where}"
        )


def attend_beside_reference(
    attend: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: BurstContext,
    visibility: Visibility,
    scale: float,
    take: Callable[[bool, list[Finding]], None],
    *,
    sink: Tensor | None = None,
    latents: Latents | None = None,
    layout: Layout | None = None,
    **more: Any,
) -> Tensor:
    """Call `attend`, a `ring_attention`, and compare its results and later its gradients.

    A collective call of the context's ranks, forward and backward. `attend` is given views of q, k,
    v, the sink and the latents, the context and `more`; `take` what was found, after the forward
    and, with True, after the backward.
    """
    spread = spread_of(context, q.shape[1] * context.ranks, layout)
    margin = margin_of(context.config, context.ranks)
    given = q.detach(), k.detach(), v.detach(), None if sink is None else sink.detach()
    reference = Reference(spread, visibility, scale, *given, margin)
    # Views: gradients that come from elsewhere are not attention's.
    q, k, v = (x.view_as(x) for x in (q, k, v))
    views = {"dq": q, "dk": k, "dv": v}
    if sink is not None:
        views["dsink"] = sink = sink.view_as(sink)
    if latents is not None:
        views["dlatent"] = latents.latent.view_as(latents.latent)
        latents = replace(latents, latent=views["dlatent"])
    inputs = {n: x for n, x in views.items() if x.requires_grad and torch.is_grad_enabled()}
    more |= {"sink": sink, "latents": latents, "layout": layout}
    out, lse = attend(q, k, v, context, return_lse=True, **more)
    actual = {"out": out.detach(), "lse": lse.detach().transpose(1, 2)[..., None]}
    take(False, compare(reference.expect(), actual, spread.own))
    douts: list[Tensor] = []

    def check_gradients(gradients: Sequence[Tensor | None]) -> None:
        actual = {  # none is as wrong as zeros, but where latents have not travelled
            name: torch.zeros_like(x) if gradient is None else gradient
            for (name, x), gradient in zip(inputs.items(), gradients, strict=True)
            if gradient is not None or name != "dlatent"
        }
        if (dsink := actual.get("dsink")) is not None:
            actual["dsink"] = spread.total(dsink.double())[None, None, :, None]
        expected = reference.expect(douts.pop())
        if latents is not None and "dlatent" in actual:  # they have travelled
            whole = LatentGradients(latents, k, v)
            expected, actual = whole.expected(expected), whole.actual(actual)
        take(True, compare(expected, actual, spread.own))

    if inputs:
        out.register_hook(douts.append)
        torch.autograd.graph.register_multi_grad_hook(list(inputs.values()), check_gradients)
    return out


def margin_of(config: BurstConfig, ranks: int) -> float:
    """Return how many roundings are allowed: sent in 16 bits a gradient is rounded at every hop."""
    return MARGIN + (ranks**0.5 if config.grad_dtype is GradDtype.MODEL else 0.0)


def spread_of(context: BurstContext, tokens: int, layout: Layout | None = None) -> Spread:
    """Return which rank holds what: in Megatron's own zigzag, or where tokens move, in our layout.

    The first does not come from our layout, so that a wrong one is found. In the second case any
    order is right if tokens follow it, which position ids show.
    """
    is_zigzag = layout is None and context.config.layout in _MEGATRONS
    if is_zigzag or context.ranks == 1:
        return Spread(megatrons_positions(tokens, context.ranks), context.group)
    layout = layout or context.layout(tokens)
    return Spread([layout.positions(rank) for rank in range(context.ranks)], context.group)


def compare(
    expected: Iterable[Expected], actual: Mapping[str, Tensor], positions: Tensor
) -> list[Finding]:
    """Compare what is found, [batch, rows at these positions, heads, size], with all its heads.

    A NaN is an error without bound.
    """
    norms: dict[str, list[Tensor]] = {}
    for each in expected:
        if each.tensor in actual:
            own = actual[each.tensor][:, :, each.heads]
            norms.setdefault(each.tensor, []).append(_norms(each, own))
    return [_finding(tensor, torch.cat(n, dim=2), positions) for tensor, n in norms.items()]


def _stretches(rows: Tensor) -> Sequence[Tensor]:
    """Cut rows into even stretches of at most `_STRETCH`: few make an uneven measure."""
    return rows.tensor_split(-(-len(rows) // _STRETCH))


def _norms(expected: Expected, actual: Tensor) -> Tensor:
    """Return [3, stretches, heads]: the norms of error, of what is allowed, of the expected."""
    actual, value = actual.double(), expected.value
    same = actual == value  # so are equal infinities, whose difference is NaN
    error = (actual - value).masked_fill(same, 0.0)
    known = value.masked_fill(value.isinf(), 0.0)
    squares = (error.square().sum(-1), expected.allowed.square(), known.square().sum(-1))
    rows = torch.stack([x.sum(0) for x in squares], dim=1)
    return torch.stack([x.sum(0) for x in _stretches(rows)], dim=1).sqrt().cpu()


def _finding(tensor: str, norms: Tensor, positions: Tensor) -> Finding:
    error, allowed, known = norms
    error = error.nan_to_num(nan=torch.inf)
    share = (error / allowed).nan_to_num(nan=0.0)  # 0 of 0
    worst = divmod(int(share.argmax()), share.shape[1])
    size = max(known[worst].item(), known.square().mean().sqrt().item()) or 1.0
    rank = dist.get_rank() if dist.is_initialized() else 0
    where = _where(tensor, error > allowed, positions)
    return Finding(tensor, error[worst].item() / size, allowed[worst].item() / size, rank, where)


def _where(tensor: str, wrong: Tensor, positions: Tensor) -> str:
    """Name the heads and tokens of what is wrong [stretches, heads]; nothing where all is right."""
    heads = wrong.any(0).nonzero()[:, 0].tolist()
    if not heads:
        return ""
    which = "all heads" if len(heads) == wrong.shape[1] else f"heads {', '.join(map(str, heads))}"
    if tensor == "dsink":
        return which
    tokens = [x for x, bad in zip(_stretches(positions), wrong.any(1), strict=True) if bad]
    first = min(tokens, key=lambda x: int(x.min()))
    return (
        f"{which}, {len(tokens)} of {len(wrong)} stretches of tokens, "
        f"first tokens {int(first.min())} to {int(first.max())}"
    )


def worst(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return for each tensor the finding of the rank whose error is the largest part of allowed."""
    by_tensor: dict[str, Finding] = {}
    for finding in findings:
        if finding.tensor not in by_tensor or finding.share > by_tensor[finding.tensor].share:
            by_tensor[finding.tensor] = finding
    return by_tensor


def table(title: str, rows: Mapping[str, Mapping[str, Finding]]) -> str:
    """Write findings as text, a line for each row: errors, each with what is allowed."""

    def cell(finding: Finding | None) -> str:
        if finding is None:
            return "-"
        return f"{finding.error:.1e} {'>' if finding.where else '<'} {finding.allowed:.1e}"

    tensors = list(dict.fromkeys(tensor for row in rows.values() for tensor in row))
    lines = [[title, *tensors]]
    lines += [[name, *(cell(row.get(tensor)) for tensor in tensors)] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
