"""What a kernel is: attention of one tile, forward and backward."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_burst.plans.mask import Band


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
class TileCall:
    """The attention of one tile, as a kernel is given it.

    q is [batch, queries, query heads, dk], k [batch, keys, kv heads, dk], v [batch, keys, kv heads,
    dv]; query head h reads kv head h // (query heads / kv heads). The tensors may be slices along
    the tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    scale: float
    soft_cap: float | None = None

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
        return self.band.window(self.q.shape[1], self.k.shape[1])

    @property
    def is_causal(self) -> bool:
        """Whether FlashAttention calls it causal: nothing to the right of its diagonal."""
        return self.window == (None, 0)


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

    Every query of a tile sees one of its keys, so that every lse is finite.
    """

    name: str

    def reasons_against(self, request: Request) -> list[str]:
        """Return why this kernel cannot serve the request; empty if it can."""
        ...

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        """Return the tile's (out, lse), newly made tensors."""
        ...

    def backward(
        self, tile: TileCall, dout: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tile's (dq, dk, dv), newly made, of the shapes and dtypes of q, k and v."""
        ...
