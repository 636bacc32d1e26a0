"""What a kernel is: attention of one tile, or of several together, forward and backward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_burst.plans.visibility.band import Band

type Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


@dataclass(frozen=True, slots=True)
class Request:
    """What a kernel is asked to serve, as far as it does not change from tile to tile."""

    device: torch.device
    dtype: torch.dtype
    query_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    is_banded: bool = False  # whether a tile is neither full nor a causal square
    soft_cap: float | None = None
    has_documents: bool = False  # whether they cut tiles, into other shapes in every batch


@dataclass(frozen=True, slots=True)
class Packing:
    """How several tiles lie one after the other in the tensors of a call."""

    query_lengths: Sequence[int]  # rows of each
    key_lengths: Sequence[int]
    query_begins: Tensor  # int32: where each begins, of all of the batch in turn, and the end
    key_begins: Tensor


@dataclass(frozen=True, slots=True)
class KernelInput:
    """The attention of one tile, or of several, as a kernel is given it.

    q is [batch, queries, query heads, dk], k [batch, keys, kv heads, dk], v [batch, keys, kv heads,
    dv]; query head h reads kv head h // (query heads / kv heads). The tensors may be slices along
    the tokens. With a packing the tokens are those of its tiles, and each tile's queries see keys
    of the tile alone. Bands are those of `batches_of`, which FlashAttention-2 can express.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band  # of several tiles that of a square: each one's, counted from its last corner
    scale: float
    soft_cap: float | None = None
    packing: Packing | None = None
    leaves_room: bool = False  # for messages, which must not wait until the call is through

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three tensors."""
        return self.q, self.k, self.v

    @property
    def is_banded(self) -> bool:
        """Whether the tile is neither full nor a causal square."""
        return self.band.is_banded(self.q.shape[1], self.k.shape[1])

    @property
    def window(self) -> tuple[int | None, int | None]:
        """(left, right) as FlashAttention counts them; None is no limit."""
        if self.packing is not None:
            return self.band.left, self.band.right
        return self.band.window(self.q.shape[1], self.k.shape[1])

    @property
    def is_causal(self) -> bool:
        """Whether FlashAttention calls it causal: nothing to the right of its diagonal."""
        return self.window == (None, 0)

    def tiles(self) -> "Iterator[tuple[slice, KernelInput]]":
        """Yield the tiles of a packing one by one, each with its queries, as slices."""
        assert self.packing is not None
        query = key = 0
        for queries, keys in zip(self.packing.query_lengths, self.packing.key_lengths, strict=True):
            rows, seen = slice(query, query + queries), slice(key, key + keys)
            tensors = self.q[:, rows], self.k[:, seen], self.v[:, seen]
            band = self.band.of_corner(queries, keys)
            yield rows, KernelInput(*tensors, band, self.scale, self.soft_cap)
            query, key = rows.stop, seen.stop


def swapped(*tensors: Tensor) -> list[Tensor]:
    """Swap tokens and heads: [B, S, H, D] to [B, H, S, D], or back."""
    return [t.transpose(1, 2) for t in tensors]


class Kernel(Protocol):
    """Attention of one tile; every backend equals the slow code below.

    With scores = scale · q kᵀ, under a soft cap soft_cap · tanh(scale · q kᵀ / soft_cap), masked by
    the band, forward returns out = softmax(scores) v in q's dtype and lse = logsumexp(scores),
    [batch, query heads, queries], natural logarithm, float32 or better. A kernel without soft caps
    names that among its reasons, and is never given one.

    Backward is that of the whole sequence, restricted to the tile: `lse` and `out` are those of the
    finished rows, P = exp(scores - lse), and `out` may be any tensor whose row products with `dout`
    are those of the finished output (delta = rowsum(dout ∘ out)).

    Every query of a tile sees one of its keys, so that every lse is finite. Of several tiles
    (`KernelInput.packing`) all that is given and returned is packed as q, k and v are.
    """

    name: str

    def reasons_against(self, request: Request) -> list[str]:
        """Return why this kernel cannot serve the request; empty if it can."""
        ...

    def forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        """Return (out, lse), newly made tensors."""
        ...

    def backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return (dq, dk, dv), newly made, of the shapes and dtypes of q, k and v."""
        ...
