"""The tokens as the ranks hold them: all, or under sequence parallelism a part on each.

There a chunk is one slice of every rank's part, so that its hidden states are gathered and their
gradient is spread behind the products of the chunks beside it, and no rank ever has those of all.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spread:
    """Hidden states [tokens of a rank, d] over a group: a part on each of `parts` ranks, or 1."""

    group: dist.ProcessGroup | None  # that the vocabulary is spread over, too
    parts: int

    def gathered(self, hidden: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of `size` of a rank's tokens, and the hidden states there of all ranks.

        They are [parts x tokens, d], part by part. While the caller computes with one the next is
        gathered; the second next takes its memory.
        """
        cuts = slices(hidden.shape[0], size)
        if self.parts == 1:
            yield from ((cut, hidden[cut]) for cut in cuts)
            return
        rows = self.parts * min(size, hidden.shape[0])
        buffers = [hidden.new_empty(rows, hidden.shape[1]) for _ in range(2)]
        waiting: deque[tuple[slice, Tensor, Any]] = deque()
        for number, cut in enumerate([*cuts, None]):
            if cut is not None:
                part = hidden[cut].contiguous()
                whole = buffers[number % 2][: self.parts * len(part)]
                work = self.start(dist.all_gather_into_tensor, whole, part)
                waiting.append((cut, whole, work))
            if number > 0:
                before, whole, work = waiting.popleft()
                work.wait()
                yield before, whole

    def start(self, collective: Callable[..., Any], output: Tensor, given: Tensor) -> Any:
        """Start a collective, to be waited for; it reads and writes after what is asked before."""
        work = collective(output, given, group=self.group, async_op=True)
        if output.device.type == "cpu":
            work.wait()  # gloo of torch 2.11 may free memory twice if a group has two at a time
        return work


class HiddenGradient:
    """The gradient of a rank's hidden states, summed over the ranks of the vocabulary."""

    def __init__(self, spread: Spread, hidden: Tensor, size: int) -> None:
        """Make it for `hidden` [tokens of a rank, d], in chunks of `size` of them."""
        self._spread, self._work = spread, None
        self._total = hidden.new_empty(hidden.shape)
        rows = spread.parts * min(size, hidden.shape[0]) if spread.parts > 1 else 0
        self._chunk = hidden.new_empty(rows, hidden.shape[1])

    def put(self, cut: slice, d_logits: Tensor, weight: Tensor) -> None:
        """Set that of a chunk: `d_logits` [parts x tokens, rows] @ `weight`."""
        if self._spread.parts == 1:
            torch.mm(d_logits, weight, out=self._total[cut])
            return
        self._wait()
        chunk = torch.mm(d_logits, weight, out=self._chunk[: d_logits.shape[0]])
        self._work = self._spread.start(dist.reduce_scatter_tensor, self._total[cut], chunk)

    def result(self) -> Tensor:
        """Return the sum [tokens of a rank, d]."""
        self._wait()
        if self._spread.parts == 1 and self._spread.group is not None:
            dist.all_reduce(self._total, group=self._spread.group)
        return self._total

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()


def slices(total: int, size: int) -> Iterator[slice]:
    """Cut [0, total) into slices of `size`; the last may be shorter."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
