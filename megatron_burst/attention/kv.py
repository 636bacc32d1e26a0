"""What of K and V travels: those of all heads, or the latents that they are made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_burst.attention.launches import Rows, rows_of
from megatron_burst.attention.sums import Sums, WireDtypes
from megatron_burst.kernels.dtypes import accumulation_dtype, as_autocast
from megatron_burst.plans.choice.cost import LatentShape
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.transport.lowered import Block
from megatron_burst.transport.memory import side_by_side


@dataclass(frozen=True, slots=True)
class Latents:
    """What this rank's K and V are made of in multi-latent attention, by autograd.

    With h heads, [W_k; W_v] the rows of `weight` that belong to a head: its v is latent · W_vᵀ, its
    k is latent · W_kᵀ and behind it the rotary key, the same for all heads.
    """

    latent: Tensor  # [batch, local tokens, rank], after its norm
    weight: Tensor  # [h · (dk - rotary + dv), rank]
    add_weight_gradient: Callable[[Tensor], object] | None = None
    """Takes what other ranks' tokens add to the weight's gradient, wide; None: autograd does."""

    @property
    def differentiable(self) -> tuple[Tensor, Tensor]:
        """The latent, and the weight as autograd is to see it."""
        is_apart = self.add_weight_gradient is not None
        return self.latent, self.weight.detach() if is_apart else self.weight

    def in_autocast(self) -> "Latents":
        """Return them in the dtype that torch.autocast asks for, if it does."""
        latent, weight = as_autocast(self.latent, self.weight)
        return replace(self, latent=latent, weight=weight)

    def shape(self, k: Tensor, v: Tensor) -> LatentShape:
        """Return what of it decides the bytes and the FLOPs; ValueError if nothing fits."""
        rows, rank = self.weight.shape
        rotary = k.shape[3] + v.shape[3] - rows / k.shape[2]
        fits = 0 < rotary == int(rotary) <= k.shape[3]
        if not fits or self.latent.shape != (*k.shape[:2], rank):
            raise ValueError(
                f"k {tuple(k.shape)} and v {tuple(v.shape)} are not made of a latent "
                f"{tuple(self.latent.shape)} by a weight {tuple(self.weight.shape)}"
            )
        if {self.latent.dtype, self.weight.dtype} != {k.dtype}:
            raise ValueError(
                f"latents must have the dtype of k and v, {k.dtype}; the latent has "
                f"{self.latent.dtype}, the weight {self.weight.dtype}"
            )
        return LatentShape(rank + int(rotary), rows * rank)


class KeysAndValues:
    """One rank's keys and values: K and V of all heads travel."""

    weight_gradient: Tensor | None = None
    """What visitors add to that of an up-projection, in the dtype of sums."""

    def __init__(self, rank: int, k: Tensor, v: Tensor) -> None:
        self._rank = rank
        self.own: Block = (k, v)
        self.sent: Block = (k, v)  # tensors with the tokens second

    def read(self, _: Item, block: Block) -> Block:
        """Return k and v of a key block, the own one or a visitor's, as it was sent."""
        return block

    def sums(self, q: Tensor, wire: WireDtypes) -> Sums:
        """Return where the gradients of q and of what travels are summed."""
        shaped = {Kind.D_QUERY: (q,), Kind.D_KV: self.sent}
        return Sums(self._rank, shaped, wire)


class ExpandedLatents(KeysAndValues):
    """Latents and rotary keys travel; K and V of a visitor are made when a tile first reads it."""

    def __init__(
        self,
        rank: int,
        k: Tensor,
        v: Tensor,
        latent: Tensor,
        weight: Tensor,
        differentiates_weight: bool = False,
    ) -> None:
        super().__init__(rank, k, v)
        self._weight, self._differentiates_weight = weight, differentiates_weight
        self._heads, self._value_dim = v.shape[2:]
        self.content_dim = len(weight) // self._heads - self._value_dim
        self.sent = side_by_side((latent[:, :, None], k[:, :, :1, self.content_dim :]))
        self.visitor: Block = ()  # its latents
        self._item = Item(Kind.KV, rank)  # of the last visitor
        self._made = self.own

    def read(self, item: Item, block: Block) -> Block:
        """Make k and v, unless they are the own ones or those of the last call."""
        if item.owner == self._rank:
            return self.own
        self.visitor = block  # in a mesh the same may have come again, to another place
        if item != self._item:
            self._made = ()  # else they would live beside the next
            self._item, (latent, rotary) = item, block
            self._made = expand(latent, rotary, self._weight, self._heads, self._value_dim)
        return self._made

    def sums(self, q: Tensor, wire: WireDtypes) -> Sums:
        """Return sums of the shapes of q and of the latents."""
        return _LatentSums(self._rank, q, self, wire)

    def reduce(self, rows: Rows, visitor: Block, dk: Tensor, dv: Tensor) -> Block:
        """Return gradients of a visitor's latents for those of its k and v; add up dW."""
        wide = accumulation_dtype(dk.dtype)
        latent = rows_of(visitor, rows)[0].flatten(0, 2)
        dkv = torch.cat([dk[..., : self.content_dim], dv], -1).flatten(2).flatten(0, 1)
        dlatent = _product(dkv, self._weight).view(*dk.shape[:2], 1, -1)
        if self._differentiates_weight:
            dweight = _product(dkv.t(), latent)
            before = self.weight_gradient
            self.weight_gradient = dweight if before is None else before.add_(dweight)
        return dlatent, dk[..., self.content_dim :].sum(2, keepdim=True, dtype=wide)


class _LatentSums(Sums):
    """Sums of q's and the latents' gradients.

    A visitor's dk and dv are summed while tiles read it, and then become those of its latents at
    once: one product a block, however many tiles it has.
    """

    def __init__(self, rank: int, q: Tensor, kv: ExpandedLatents, wire: WireDtypes) -> None:
        super().__init__(rank, {Kind.D_QUERY: (q,), Kind.D_KV: kv.sent}, wire)
        self._own = Sums(rank, {Kind.D_KV: kv.own}, WireDtypes())
        self._kv = kv
        self._visitor: tuple[Item, Block] | None = None

    def add(self, item: Item, rows: Rows, parts: Block) -> None:
        """Add a kernel call's gradients; its visitor is the one that was read last."""
        if item.kind is not Kind.D_KV:
            super().add(item, rows, parts)
            return
        if item.owner != self._rank and (self._visitor is None or self._visitor[0] != item):
            self.end_step()
            self._visitor = item, self._kv.visitor
        self._own.add(item, rows, parts)

    def end_step(self) -> None:
        """Turn what was summed of a visitor into gradients of its latents."""
        if self._visitor is not None:
            item, latents = self._visitor
            self._visitor = None
            rows, (dk, dv) = self._own.pop(item)
            super().add(item, rows, self._kv.reduce(rows, latents, dk, dv))

    def total(self, item: Item) -> Block:
        """Return of keys dk and dv of the own tiles, with the visits of the rotary key; and dc."""
        total = super().total(item)
        if item.kind is not Kind.D_KV:
            return total
        (dk, dv), (dlatent, drotary) = self._own.total(item), total
        dk = dk.to(drotary.dtype)
        dk[:, :, :1, self._kv.content_dim :] += drotary  # all heads' is one
        return dk, dv, dlatent[:, :, 0]


def expand(
    latent_BS1R: Tensor, rotary_BS1D: Tensor, weight: Tensor, heads: int, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Make k and v of these heads, as `Latents` says."""
    made = torch.nn.functional.linear(latent_BS1R, weight).unflatten(-1, (heads, -1)).squeeze(2)
    content, v = made.split([made.shape[-1] - value_dim, value_dim], dim=-1)
    k = torch.cat([content, rotary_BS1D.expand(-1, -1, heads, -1)], -1)
    return k, v.contiguous()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the dtype of sums, not rounded on the way."""
    wide = accumulation_dtype(b.dtype)
    if b.is_cuda and b.dtype != wide:
        return torch.mm(a.to(b.dtype), b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)
