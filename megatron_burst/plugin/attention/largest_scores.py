"""The largest score of a head over all ranks, as --qk-clip wants it: exact where it clips.

No kernel returns it. But a row's log-sum-exp (LSE) is above each of its scores, by at most the
logarithm of how many keys it sees. So a head whose LSEs are all within the threshold is not to be
clipped, whatever its largest score is; and where some are above it, one of those rows alone can
have a score above it. They go to the ranks that hold their keys, and are multiplied once more.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.kernels.dtypes import without_autocast
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.reference.dense import Visibility

_PAIRS_AT_ONCE = 2**22  # of rows and keys


@torch.no_grad()
@without_autocast
def largest_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    context: BurstContext,
    mask: Mask,
    layout: Layout,
    scale: float,
    threshold: float,
) -> Tensor:
    """Return float32 [heads]: what is above the threshold is the largest score of a head.

    What is not is some number between its largest score and the threshold. The maximum over the
    ranks is right: a rank has the scores of its own keys. A collective call, which the host waits
    for.

    Args:
        q: [batch, rows, heads, d] of this rank.
        k: [batch, rows, kv heads, d].
        lse: [batch, heads, rows].
    """
    positions = layout.positions(context.rank).to(q.device)
    lse = _without_padding(lse, mask, positions)
    bounds = lse.amax((0, 2)).float()
    if context.group is not None:
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=context.group)
    largest = bounds.clamp(min=0)  # Megatron divides by it
    if not bool((bounds > threshold).any()):
        return largest
    place = (lse > threshold).nonzero()  # of a row: batch, head, number
    batch, head, row = place.unbind(1)
    where = torch.stack([batch, head, positions[row]], 1)
    queries, where = (_of_all_ranks(x, context) for x in (q[batch, row, head], where))
    visibility, queries_a_key = _visibility(mask, layout.tokens), q.shape[2] // k.shape[2]
    for number in (bounds > threshold).nonzero()[:, 0].tolist():
        best, of_head = [largest.new_zeros(())], where[:, 1] == number
        for sample in where[of_head, 0].unique().tolist():
            chosen = (of_head & (where[:, 0] == sample)).nonzero()[:, 0]
            keys = k[sample, :, number // queries_a_key].float()
            for part in chosen.split(max(1, _PAIRS_AT_ONCE // len(keys))):
                scores = scale * queries[part].float() @ keys.T
                seen = visibility.pairs(where[part, 2], positions)
                best.append(scores.masked_fill(~seen, 0.0).amax())
        largest[number] = torch.stack(best).amax()
    return largest


def _without_padding(lse: Tensor, mask: Mask, positions: Tensor) -> Tensor:
    """Return them without what rows of padding have: that of a sink."""
    if not mask.documents or not mask.padding:
        return lse
    ends, padding = (torch.tensor(x, device=lse.device) for x in (mask.documents[1:], mask.padding))
    is_padding = torch.isin(torch.bucketize(positions, ends, right=True), padding)
    return lse.masked_fill(is_padding, -torch.inf)


def _of_all_ranks(x: Tensor, context: BurstContext) -> Tensor:
    """Return the rows of all ranks, and zeros, whose scores are no largest ones."""
    if context.group is None:
        return x
    most = torch.tensor(len(x), device=x.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=context.group)
    padded = F.pad(x, (0, 0, 0, int(most) - len(x)))
    parts = [torch.empty_like(padded) for _ in range(context.ranks)]
    dist.all_gather(parts, padded, group=context.group)
    return torch.cat(parts)


def _visibility(mask: Mask, tokens: int) -> Visibility:
    """Return a mask pair by pair; rows of padding may be left as they are."""
    return Visibility(
        causal=mask.is_causal,
        left=-1 if mask.window is None else mask.window,
        cu_seqlens=None if mask.documents is None else torch.tensor(mask.documents),
        blocks=None if mask.block_table is None else torch.from_numpy(mask.blocks.copy()),
        tokens_per_sample=tokens,
    )
