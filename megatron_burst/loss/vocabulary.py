"""The vocabulary spread over ranks: whose targets are whose, and what the shards sum to."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.loss.call import Call
from megatron_burst.loss.tokens import is_unreadable

LOSS_OUTSIDE = 1e30
"""Of a target outside the vocabulary: a loss mask of 0 makes it 0, and nobody overlooks it."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets as one rank sees them: [tokens] each."""

    column: Tensor  # of this rank's shard; 0 where the target is another's
    mine: Tensor  # bool: the target is in this rank's shard
    counted: Tensor  # bool: not ignored
    known: Tensor  # bool: in the vocabulary, or ignored

    def in_rows(self, rows: slice) -> "Targets":
        """Return them as seen by some rows of the shard."""
        column = self.column - rows.start
        mine = self.mine & (column >= 0) & (column < rows.stop - rows.start)
        return Targets(column.mul_(mine), mine, self.counted, self.known)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`shard` rows of the vocabulary on each rank of `group`, in order; None is one rank alone."""

    shard: int
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else self.group.size()

    @property
    def size(self) -> int:
        """Rows of all ranks."""
        return self.shard * self.ranks

    def locate(self, targets: Tensor, ignore_index: int) -> Targets:
        """Find the targets [tokens] in this rank's shard."""
        counted = targets != ignore_index
        known = ~counted | ((targets >= 0) & (targets < self.size))
        start = 0 if self.group is None else self.group.rank() * self.shard
        return Targets(targets, counted, counted, known).in_rows(slice(start, start + self.shard))

    def check_gradient(self, grad: Tensor, targets: Tensor, where: Targets) -> Tensor:
        """Return the gradient of the losses [tokens], NaN where a target outside of it counts.

        Raises:
            ValueError: instead of NaN on the CPU, where looking costs nothing.
        """
        lost = ~where.known & (grad != 0)
        if lost.device.type == "cpu" and not is_unreadable(lost) and lost.any():
            raise ValueError(
                f"target {int(targets[lost][0])} is outside the vocabulary of "
                f"{self.size} rows, and its loss counts: mask it, or give it ignore_index"
            )
        return grad.masked_fill(lost, torch.nan)

    def combine(self, statistics: Tensor, *, entropy: bool) -> Tensor:
        """Return the statistics [statistics, tokens] of all shards together: one collective."""
        if self.group is None:
            return statistics
        numbers, tokens = statistics.shape
        gathered = statistics.new_empty(self.ranks * numbers, tokens)
        dist.all_gather_into_tensor(gathered, statistics, group=self.group)
        of_ranks = gathered.view(self.ranks, numbers, tokens)
        highest = of_ranks[:, 0].amax(0)
        lower = of_ranks[:, 0] - highest
        if entropy:  # exp(z - highest) (z - highest)
            of_ranks[:, 3] += lower * of_ranks[:, 1]
            of_ranks[:, 3] *= lower.exp()
        of_ranks[:, 1] *= lower.exp_()
        total = of_ranks.sum(0)
        total[0] = highest
        return total


def losses(statistics: Tensor, targets: Targets, vocabulary: int, call: Call) -> list[Tensor]:
    """Return losses, log-sum-exps and, if asked for, entropies, [tokens] each.

    From the statistics of the whole vocabulary.

    A target outside the vocabulary has the loss `LOSS_OUTSIDE`.
    """
    lse = statistics[0] + statistics[1].log()
    loss = lse - statistics[2]
    if smoothing := call.label_smoothing:
        loss += smoothing * (statistics[2] - statistics[-1] / vocabulary)
    if call.z_loss:
        loss += call.z_loss * lse.square()
    loss.masked_fill_(~targets.counted, 0.0).masked_fill_(~targets.known, LOSS_OUTSIDE)
    if not call.entropy:
        return [loss, lse]
    entropy = statistics[1].log() - statistics[3] / statistics[1]
    return [loss, lse, entropy.masked_fill_(~targets.counted, 0.0)]
