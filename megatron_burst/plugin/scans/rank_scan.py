"""The scan and the convolution of one rank's contiguous shard, and what it makes of a state before.

The states begin anew at every document. What a rank reads of the state S that arrives is linear in
it, so a rank scans before it knows S: out += reach @ S, in the rows of its first document alone.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_burst.plugin.scans.hand_over import state_before, tokens_before
from megatron_burst.plugin.scans.recurrence import decaying_memory
from megatron_burst.plugin.scans.shards import Shard
from megatron_burst.transport.pinned import to_device

CHUNK = 64  # tokens that plain torch computes together


class DeltaRule(Protocol):
    """Runs the gated delta rule over documents: `plain_delta_rule`, or a kernel that equals it."""

    def __call__(
        self, inputs: list[Tensor], memory: Tensor | None = None, bounds: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs [B, T, H, dv] and, without bounds, the memory at the end."""


class Scanned(NamedTuple):
    """What a rank's own tokens give, and what they would do with a state that arrives."""

    out: Tensor  # [B, T, H, dv]
    final: Tensor  # [B, H, dk, dv], the state behind the last token
    reach: Tensor  # [B, rows of the first document that began before, groups, dk]
    scale: Tensor | None  # [B, those rows, H, 1], of what `reach` reads
    transition: Tensor  # [B, H, dk, dk] or [B, H, 1, 1]: what becomes of a state that arrives


def with_state_before(scanned: Scanned, group: dist.ProcessGroup | None) -> Tensor:
    """Return the outputs with the state of the ranks before; None is a rank alone."""
    out, final, reach, scale, transition = scanned
    if group is None or group.size() == 1:
        return out
    state = state_before(final, transition, group)  # [B, H, dk, dv]
    groups, tokens = reach.shape[2], reach.shape[1]
    of_groups = state.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)  # [B, groups, dk, ...]
    read = reach.to(state.dtype).transpose(1, 2) @ of_groups
    read = read.unflatten(3, (-1, state.shape[-1])).transpose(1, 2).flatten(2, 3)
    read = read if scale is None else scale * read
    return torch.cat([(out[:, :tokens] + read).to(out.dtype), out[:, tokens:]], 1)


def scan_by_decay(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, shard: Shard, chunk: int = CHUNK
) -> Scanned:
    """Scan the documents of a shard with `decaying_memory`, a loop over them; see there."""
    outs, final = [], v.new_zeros(0)
    for start, stop in pairwise(shard.bounds):
        document = (x[:, start:stop] for x in (q, k, v, log_decay))
        out, final = decaying_memory(*document, chunk=chunk)
        outs.append(out)
    return decayed(torch.cat(outs, 1), final, q, log_decay, shard)


def decayed(out: Tensor, final: Tensor, q: Tensor, log_decay: Tensor, shard: Shard) -> Scanned:
    """Complete the scan of a memory that only decays."""
    tokens = shard.bounds[1] if shard.before else 0
    left = log_decay[:, :tokens].to(final.dtype).cumsum(1).exp().unsqueeze(-1)  # [B, tokens, H, 1]
    transition = final.new_zeros(*final.shape[:2], 1, 1)
    if shard.is_crossed:
        transition = left[:, -1].unsqueeze(-1)
    return Scanned(out, final, q[:, :tokens], left, transition)


def scan_by_delta_rule(rule: DeltaRule, given: list[Tensor], shard: Shard) -> Scanned:
    """Scan the documents of a shard: q, k [B, T, H, dk], v [B, T, H, dv], decay, beta [B, T, H].

    A state goes through the first document, and one out of the last: the rule is called for each of
    these, and once for all documents between them.
    """

    def part(start: int, stop: int) -> list[Tensor]:
        return [x[:, start:stop] for x in given]

    first, last = shard.bounds[1] if shard.before else 0, shard.bounds[-2]
    outs, final = [], None
    reach, transition = given[0][:, :0], None
    if shard.before:
        out, final, reach, transition = _through(rule, part(0, first))
        outs.append(out)
    if first < last:
        inside = tuple(b - first for b in shard.bounds if first <= b <= last)
        outs.append(rule(part(first, last), bounds=inside)[0])
    if not shard.is_crossed:
        out, final = rule(part(last, shard.tokens))
        outs.append(out)
    assert final is not None
    if not shard.is_crossed or transition is None:
        transition = final.new_zeros(*final.shape[:2], *[final.shape[2]] * 2)
    return Scanned(torch.cat(outs, 1), final, reach, None, transition)


def _through(rule: DeltaRule, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, F, what the rows read of a state before them, and T, by one call.

    Columns of the memory do not meet. So dk more, that hold the identity and get no values, are at
    the end what becomes of every state, and are read as any would be.
    """
    q, k, v, *gates = inputs
    batch, _, heads, size = k.shape
    columns = [v.shape[-1], size]
    dtype = torch.promote_types(v.dtype, torch.float32)
    identity = torch.eye(size, device=v.device, dtype=dtype).expand(batch, heads, -1, -1)
    memory = F.pad(identity, (columns[0], 0))
    out, final = rule([q, k, F.pad(v, (0, size)), *gates], memory)
    assert final is not None
    outs, finals = out.split(columns, -1), final.split(columns, -1)
    return outs[0], finals[0], outs[1], finals[1]


def plain_delta_rule(
    inputs: list[Tensor], memory: Tensor | None = None, bounds: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """`decaying_memory` with beta, and queries scaled by 1 / sqrt(dk)."""
    q, k, v, log_decay, beta = inputs
    scaled = q * k.shape[-1] ** -0.5, k, v, log_decay, beta
    if not bounds:
        return decaying_memory(*scaled, memory, chunk=CHUNK)
    pieces = ([x[:, start:stop] for x in scaled] for start, stop in pairwise(bounds))
    return torch.cat([decaying_memory(*piece, chunk=CHUNK)[0] for piece in pieces], 1), None


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shard: Shard,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Convolve every channel with its own weights over the last tokens of the same document.

    With x zero before the first token of each:

        out[t] = bias + sum(weight[:, j] * x[t + 1 + j - width] for j in range(width))

    Args:
        x: [B, T, channels], of this rank.
        weight: [channels, width].
        bias: [channels], or None.
        group: the ranks, whose rows are contiguous; a collective call. None: this rank alone.
    """
    channels, width = weight.shape
    halo = x.new_zeros(x.shape[0], width - 1, channels)
    if group is not None and group.size() > 1:
        halo = tokens_before(x, width - 1, group)
    there = torch.cat([halo, x], 1)
    out = F.conv1d(there.mT, weight.unsqueeze(1), bias, groups=channels).mT
    tokens, own = (to_device(tensor, x.device) for tensor in shard.near_starts(width))
    if not len(tokens):
        return out
    windows = there[:, tokens.unsqueeze(1) + torch.arange(width, device=x.device)]
    kept = torch.where(own.unsqueeze(-1), windows, 0)  # [B, tokens, width, channels]
    anew = (kept * weight.t()).sum(2)
    return out.index_copy(1, tokens, (anew if bias is None else anew + bias).to(out.dtype))
