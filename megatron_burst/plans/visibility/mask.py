"""Which keys a query sees: between two ranges of positions a band around a diagonal."""

import hashlib
import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_burst.plans.visibility.band import Bools, Ints

# How a piece of queries sees a piece of keys.
NOT, PARTLY, FULLY = 0, 1, 2

type Bounds = tuple[Ints, Ints]


@dataclass(frozen=True)
class Mask:
    """The attention mask of a whole sequence, never built as a matrix.

    Query i sees key j if all that is given allows it: j <= i where causal, i - j <= window, both in
    one document, and block_table[block of i, block of j].
    """

    is_causal: bool
    window: int | None = None
    documents: tuple[int, ...] | None = field(default=None, repr=False)
    block_table: bytes | None = field(default=None, repr=False)
    """A byte for each pair of blocks, row after row; see `blocks`."""
    query_stop: int | None = None
    """Queries at this position and later see nothing: their results are known already."""
    padding: tuple[int, ...] = field(default=(), repr=False)
    """The numbers of those documents that are padding: they see nothing and nobody sees them."""

    @cached_property
    def digest(self) -> bytes:
        """What masks are compared by: thousands of documents are read once for it, not a layer."""
        every = (getattr(self, part.name) for part in fields(self))
        texts = (x if isinstance(x, bytes) else repr(x).encode() for x in every)
        return hashlib.sha256(b"|".join(texts)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @classmethod
    def causal(
        cls,
        *,
        window: int | None = None,
        documents: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> "Mask":
        """Let position i see the positions up to and including i, as far as the rest allows.

        Args:
            window: how many positions back, beside itself: Megatron's `window_size[0]`.
            documents: where documents begin, and last where the sequence ends: `cu_seqlens`.
            lengths: of each document without the padding at its end, which sees nothing and is not
                seen; None is no padding.
            block_table: bool [n, n] over n equal blocks of the sequence.

        Raises:
            ValueError: a negative window, boundaries that do not grow from 0, lengths that are not
                those of the documents or less, a table not square.
        """
        mask = cls.full(
            window=window, documents=documents, lengths=lengths, block_table=block_table
        )
        return replace(mask, is_causal=True)

    @classmethod
    def full(
        cls,
        *,
        window: int | None = None,
        documents: Sequence[int] | Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        block_table: Tensor | None = None,
    ) -> "Mask":
        """Let every position see every position, as far as the rest allows; see `causal`."""
        window = None if window is None else int(window)
        if window is not None and window < 0:
            raise ValueError(f"a window of {window} positions is negative; None is no window")
        bounds = None if documents is None else tuple(_ints_of(documents))
        if bounds is not None:
            grow = all(a < b for a, b in pairwise(bounds))
            if len(bounds) < 2 or bounds[0] != 0 or not grow:
                raise ValueError(
                    f"document boundaries grow from 0 to the end of the sequence, got {bounds[:8]}"
                )
        padding: tuple[int, ...] = ()
        if lengths is not None:
            bounds, padding = _padding_apart(bounds or (0,), _ints_of(lengths))
        table = None if block_table is None else _bytes_of(block_table)
        return cls(False, window, bounds, table, padding=padding)

    def __str__(self) -> str:
        parts = ["causal" if self.is_causal else "full"]
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.documents is not None:
            count = len(self.documents) - 1 - len(self.padding)
            parts.append(f"{count} packed sequences" + (" with padding" if self.padding else ""))
        if self.block_table is not None:
            parts.append(f"{self.side} blocks")
        if self.query_stop is not None:
            parts.append(f"queries before {self.query_stop}")
        if (self.documents, self.block_table) != (None, None):
            parts.append(f"digest {self.digest.hex()[:16]}")
        return ", ".join(parts)

    def check_length(self, tokens: int) -> None:
        """Raise a ValueError if the documents or blocks are of a sequence of another length."""
        if self.documents is not None and self.documents[-1] != tokens:
            raise ValueError(
                f"the documents end at {self.documents[-1]}, the sequence has {tokens} tokens"
            )
        if self.block_table is not None and tokens % self.side:
            raise ValueError(
                f"{tokens} tokens do not divide into the block mask's {self.side} blocks: change "
                "--seq-length or --burst-block-mask"
            )

    def of_length(self, tokens: int) -> "Mask":
        """Return it for so many tokens, without a window that hides nothing; see `check_length`."""
        self.check_length(tokens)
        if self.window is None:
            return self
        longest = max(b - a for a, b in pairwise(self.documents or (0, tokens)))
        return replace(self, window=None) if self.window >= longest - 1 else self

    @property
    def side(self) -> int:
        """How many blocks the sequence has for the block mask."""
        return math.isqrt(len(self.block_table or ()))

    @property
    def blocks(self) -> Bools:
        """Which blocks of keys each block of queries sees: [side, side]."""
        return np.frombuffer(self.block_table or b"", np.bool).reshape(self.side, self.side)

    @property
    def is_sparse(self) -> bool:
        """Whether something but causality hides keys."""
        return (self.window, self.documents, self.block_table, self.query_stop) != (None,) * 4

    def cuts(self, tokens: int) -> list[int]:
        """Return the positions at which documents and blocks begin, in order, 0 left out."""
        cuts = set(self.documents[1:-1]) if self.documents else set()
        if self.block_table is not None:
            size = tokens // self.side
            cuts |= set(range(size, tokens, size))
        if self.query_stop is not None:
            cuts.add(self.query_stop)
        return sorted(cuts)

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """Return positions before and behind which none of these queries sees a key."""
        low, high = 0, last if self.is_causal else sys.maxsize
        if self.window is not None:
            low = first - self.window
        if self.documents is not None:
            low = max(low, self.documents[bisect_right(self.documents, first) - 1])
            high = min(high, self.documents[bisect_right(self.documents, last)] - 1)
        return low, high

    def overview(self, queries: Bounds, keys: Bounds, tokens: int) -> NDArray[np.int8]:
        """Say of every piece of queries how it sees every piece of keys: a table of NOT … FULLY.

        Each side is the first and the last position of its pieces, which cross none of
        `cuts(tokens)`.
        """
        (first, last), (key_first, key_last) = [x[:, None] for x in queries], keys
        fully = np.ones((len(first), len(key_first)), bool)
        never = ~fully
        if self.is_causal:
            fully &= key_last <= first
            never |= key_first > last
        if self.window is not None:
            fully &= last - key_first <= self.window
            never |= first - key_last > self.window
        if self.documents is not None:
            starts = np.array(self.documents)
            numbers = [np.searchsorted(starts, x, "right") for x in (first, key_first)]
            never |= numbers[0] != numbers[1]
            never |= np.isin(numbers[0] - 1, self.padding)
        if self.block_table is not None:
            size = tokens // self.side
            never |= ~self.blocks[first // size, key_first // size]
        if self.query_stop is not None:
            never |= first >= self.query_stop
        return (PARTLY + fully.astype(np.int8)) * ~never  # FULLY is one more


def _padding_apart(
    bounds: Sequence[int], lengths: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Make the padding documents of its own; return all boundaries and the padding's numbers."""
    whole = [stop - start for start, stop in pairwise(bounds)]
    each = zip(lengths, whole, strict=False)
    if len(whole) != len(lengths) or not all(0 <= length <= most for length, most in each):
        raise ValueError(
            f"{len(whole)} documents with padding, of {whole[:8]} tokens, cannot be of "
            f"{list(lengths[:8])} without it"
        )
    cuts, padding = [0], list[int]()
    for length, (start, stop) in zip(lengths, pairwise(bounds), strict=True):
        if start < start + length < stop:
            cuts.append(start + length)
        if start + length < stop:
            padding.append(len(cuts) - 1)
        cuts.append(stop)
    return tuple(cuts), tuple(padding)


def _ints_of(numbers: Sequence[int] | Tensor) -> list[int]:
    """Read a tensor at once: one by one the host would wait for the device as often."""
    values = numbers.tolist() if isinstance(numbers, Tensor) else numbers
    return [*map(int, values)]


def _bytes_of(table: Tensor) -> bytes:
    table = torch.as_tensor(table)  # of numpy or lists, as documents may be
    is_square = table.ndim == 2 and table.shape[0] == table.shape[1] > 0
    if not is_square or table.dtype != torch.bool:
        raise ValueError(
            "a block mask is a square table of booleans, at least 1 x 1, got "
            f"{tuple(table.shape)} of {table.dtype}"
        )
    return table.cpu().numpy().tobytes()
