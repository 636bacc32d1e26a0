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
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states of this rank's part of the tokens, or of some of them."""

    states: Tensor  # [tokens of a part, d]
    index: Tensor | None = None  # which of them; None: all

    def __len__(self) -> int:
        return len(self.states if self.index is None else self.index)

    def of(self, cut: slice) -> "Hidden":
        """Return a slice of these tokens'."""
        if self.index is None:
            return Hidden(self.states[cut])
        return Hidden(self.states, self.index[cut])

    def read(self) -> Tensor:
        """Return [len(self), d]."""
        return self.states if self.index is None else self.states[self.index]


type Chosen = tuple[Hidden, Tensor | None]
"""Hidden states of some tokens, and which of each part they are, [parts, tokens]; None: all."""


def take(x: Tensor, index: Tensor | None) -> Tensor:
    """Return those of `x` [..., parts, tokens of a part] at `index` [parts, tokens]; None: all."""
    return x if index is None else x.take_along_dim(index.expand(*x.shape[:-1], -1), -1)


def put(x: Tensor, index: Tensor | None, values: Tensor) -> None:
    """Set them; without an index `values` is `x`."""
    if index is not None:
        x.scatter_(-1, index.expand_as(values), values)


@dataclass(frozen=True, slots=True)
class Spread:
    """Hidden states [tokens of a rank, d] over a group: a part on each of `parts` ranks, or 1."""

    group: dist.ProcessGroup | None  # that the vocabulary is spread over, too
    parts: int

    def choose(self, hidden: Tensor, chosen: Tensor) -> Chosen:
        """Return those tokens that are `chosen` [parts, tokens of a part].

        Every part gives as many: where it has fewer, others after them. The host waits for the
        device, so all are taken where it cannot read.
        """
        if is_unreadable(chosen):
            return Hidden(hidden), None
        most = int(chosen.sum(1).max())
        if most == chosen.shape[1]:
            return Hidden(hidden), None
        index = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
        own = 0 if self.group is None or self.parts == 1 else self.group.rank()
        return Hidden(hidden, index[own]), index

    def gathered(self, hidden: Hidden, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield a rank's slice of each chunk of `size` tokens, and all ranks' hidden states there.

        They are [parts x tokens, d], part by part. While the caller computes with one the next is
        gathered; the second next takes its memory.
        """
        cuts = slices(len(hidden), size // self.parts)
        if self.parts == 1:
            yield from ((cut, hidden.of(cut).read()) for cut in cuts)
            return
        rows = min(size, self.parts * len(hidden))
        buffers = [hidden.states.new_empty(rows, hidden.states.shape[1]) for _ in range(2)]
        waiting: deque[tuple[slice, Tensor, Any]] = deque()
        for number, cut in enumerate([*cuts, None]):
            if cut is not None:
                part = hidden.of(cut).read().contiguous()
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
    """The gradient of a rank's hidden states, summed over the ranks of the vocabulary.

    It is 0 for tokens that are not among `hidden`.
    """

    def __init__(self, spread: Spread, hidden: Hidden, size: int) -> None:
        """Make it in chunks of `size` tokens."""
        states, self._index, self._spread = hidden.states, hidden.index, spread
        make = states.new_empty if self._index is None else states.new_zeros
        self._total = make(states.shape)
        rows = min(size, spread.parts * len(hidden)) if spread.parts > 1 else 0
        self._chunk = states.new_empty(rows, states.shape[1])
        self._under_way: tuple[Any, Tensor | None, Tensor] | None = None

    def put(self, cut: slice, d_logits: Tensor, weight: Tensor) -> None:
        """Set that of a chunk: `d_logits` [parts x tokens, rows] @ `weight`."""
        place = None if self._index is None else self._index[cut]
        if self._spread.parts == 1:
            if place is None:
                torch.mm(d_logits, weight, out=self._total[cut])
            else:
                self._total.index_copy_(0, place, d_logits @ weight)
        else:
            self._wait()
            chunk = torch.mm(d_logits, weight, out=self._chunk[: d_logits.shape[0]])
            own = self._total[cut] if place is None else chunk.new_empty(len(place), chunk.shape[1])
            work = self._spread.start(dist.reduce_scatter_tensor, own, chunk)
            self._under_way = work, place, own

    def result(self) -> Tensor:
        """Return the sum [tokens of a rank, d]."""
        self._wait()
        if self._spread.parts == 1 and self._spread.group is not None:
            dist.all_reduce(self._total, group=self._spread.group)
        return self._total

    def _wait(self) -> None:
        if self._under_way is not None:
            work, place, own = self._under_way
            work.wait()
            if place is not None:
                self._total.index_copy_(0, place, own)
            self._under_way = None


def is_unreadable(x: Tensor) -> bool:
    """Whether it has no values, or a CUDA graph is made, in which no host waits for the device."""
    return is_without_values(x) or is_captured(x)


def is_without_values(x: Tensor) -> bool:
    """Whether it is on the device meta, or of FakeTensorMode."""
    return x.is_meta or isinstance(x, FakeTensor)


def is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is made of it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def slices(total: int, size: int) -> Iterator[slice]:
    """Cut [0, total) into slices of `size`; the last may be shorter."""
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
