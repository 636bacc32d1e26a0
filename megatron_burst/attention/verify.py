"""Compares what a rank has found with dense attention, and says where it is wrong."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.dense import MARGIN, Expected, Spread, megatrons_positions
from megatron_burst.config import GradDtype, LayoutName

STRETCH = 32
"""Tokens whose errors are summed up to one number: few enough for a border that is one off."""


def spread_of(context: BurstContext, tokens: int) -> Spread:
    """Return which rank holds what: in Megatron's own zigzag, or where tokens move, in our layout.

    The first does not come from our layout, so that a wrong one is found. In the second case any
    order is right if tokens follow it, which position ids show.
    """
    if context.config.layout is LayoutName.ZIGZAG or context.ranks == 1:
        return Spread(megatrons_positions(tokens, context.ranks), context.group)
    layout = context.layout(tokens)
    return Spread([layout.positions(rank) for rank in range(context.ranks)], context.group)


def margin(context: BurstContext) -> float:
    """Return `Dense`'s margin: travelling in 16 bits a gradient is rounded at every hop."""
    return MARGIN + (context.ranks**0.5 if context.config.grad_dtype is GradDtype.MODEL else 0)


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
    where: str = ""
    """Which heads and tokens are wrong; nothing where all is right."""

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


def compare(
    expected: Iterable[Expected], found: Mapping[str, Tensor], positions: Tensor, rank: int
) -> list[Finding]:
    """Compare tensors head by head; a NaN is an error without bound.

    Args:
        expected: any heads of any tensors, `dsink` apart from the others.
        found: [batch, rows, heads, size] by name.
        positions: of the rows, to be named.
        rank: to be named.
    """
    records: dict[str, _Record] = {}
    stretches = cut(positions)
    for head in expected:
        own = found[head.tensor][:, :, head.head]
        rows = [(0, own.shape[1])] if head.tensor == "dsink" else stretches
        record = records.setdefault(head.tensor, _Record(head.tensor, rows))
        record.add(head, own)
    return [record.finding(positions, rank) for record in records.values()]


def cut(positions: Tensor) -> list[tuple[int, int]]:
    """Cut rows into stretches of at most `STRETCH` whose positions follow each other."""
    jumps = (positions.diff() != 1).nonzero()[:, 0] + 1
    borders = [0, *jumps.tolist(), len(positions)]
    stretches: list[tuple[int, int]] = []
    for start, stop in pairwise(borders):
        parts = -(-(stop - start) // STRETCH)  # even ones: few tokens make an uneven measure
        ends = [start + (stop - start) * i // parts for i in range(parts + 1)]
        stretches += pairwise(ends)
    return stretches


class _Record:
    """The errors of one tensor: [heads, stretches]."""

    def __init__(self, tensor: str, stretches: Sequence[tuple[int, int]]) -> None:
        self._tensor, self._stretches = tensor, stretches
        self._heads: list[int] = []
        self._norms: list[Tensor] = []  # of each head [3, stretches]: error, allowed, expected

    def add(self, expected: Expected, found: Tensor) -> None:
        """Take one head: [batch, rows, size]."""
        found, value = found.double(), expected.value
        same = found == value  # so are equal infinities, whose difference is NaN
        error = (found - value).masked_fill(same, 0.0)
        known = value.masked_fill(value.isinf(), 0.0)
        squares = (error.square().sum(-1), expected.allowed.square(), known.square().sum(-1))
        rows = torch.stack([x.sum(0) for x in squares])
        norms = [rows[:, start:stop].sum(1) for start, stop in self._stretches]
        self._heads.append(expected.head)
        self._norms.append(torch.stack(norms, dim=1).sqrt().cpu())

    def finding(self, positions: Tensor, rank: int) -> Finding:
        """Return the worst of it, and where errors are larger than allowed."""
        error, allowed, known = torch.stack(self._norms).unbind(1)
        error = error.nan_to_num(nan=torch.inf)
        wrong = error > allowed
        share = (error / allowed).nan_to_num(nan=0.0)  # 0 of 0
        head, stretch = divmod(int(share.argmax()), len(self._stretches))
        size = max(known[head, stretch].item(), known.square().mean().sqrt().item()) or 1.0
        return Finding(
            self._tensor,
            error[head, stretch].item() / size,
            allowed[head, stretch].item() / size,
            rank,
            self._where(wrong, positions) if wrong.any() else "",
        )

    def _where(self, wrong: Tensor, positions: Tensor) -> str:
        heads = [head for head, row in zip(self._heads, wrong, strict=True) if row.any()]
        listed = [int(stretch) for stretch in wrong.any(0).nonzero()]
        which = "all heads" if len(heads) == len(self._heads) else f"heads {_short(heads)}"
        if self._tensor == "dsink":
            return "of any head"
        places = sorted(
            (int(positions[start]), int(positions[stop - 1]))
            for start, stop in (self._stretches[stretch] for stretch in listed)
        )
        first, last = places[0]
        for start, stop in places[1:]:
            if start != last + 1:
                break
            last = stop
        return (
            f"{which}, {len(listed)} of {len(self._stretches)} stretches of tokens, "
            f"first tokens {first} to {last}"
        )


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


def worst(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return for each tensor the finding of the rank whose error is the largest part of allowed."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.tensor not in found or finding.share > found[finding.tensor].share:
            found[finding.tensor] = finding
    return found


def table(title: str, rows: Mapping[str, Mapping[str, Finding]]) -> str:
    """Write findings as text, a line for each row: errors, each with what is allowed."""
    tensors = list(dict.fromkeys(tensor for row in rows.values() for tensor in row))
    lines = [[title, *tensors]]
    lines += [[name, *(cell(row.get(tensor)) for tensor in tensors)] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def cell(finding: Finding | None) -> str:
    """Write an error beside what is allowed."""
    if finding is None:
        return "-"
    sign = ">" if finding.where else "<"
    return f"{finding.error:.1e} {sign} {finding.allowed:.1e}"
