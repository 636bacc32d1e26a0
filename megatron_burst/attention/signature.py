"""What decides the plans and the kernel of an attention call."""

from typing import NamedTuple

import torch

from megatron_burst.config import GradDtype
from megatron_burst.kernels import Request
from megatron_burst.plans.choice.cost import LatentShape, Shape
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask

type KindOfTensor = tuple[torch.Size, torch.dtype, torch.device]


class Given(NamedTuple):
    """What a rank is given in a call, all but the values of tensors: what ranks compare it by."""

    q: KindOfTensor
    k: KindOfTensor
    v: KindOfTensor
    sink: KindOfTensor | None
    latents: tuple[KindOfTensor, KindOfTensor] | None  # the latent and the weight
    mask: Mask
    scale: float
    soft_cap: float | None
    layout: Layout | None
    memory: tuple[float, bool] | None  # its fraction, and whether it is full
    returns_lse: bool
    has_backward: bool
    is_deterministic: bool

    def __str__(self) -> str:
        parts = [
            f"{name} {tuple(getattr(self, name)[0])} {getattr(self, name)[1]}" for name in "qkv"
        ]
        parts += [f"{self.mask}", f"scale {self.scale:.9g}"]
        parts += [f"soft cap {self.soft_cap:g}"] if self.soft_cap is not None else []
        parts += [f"a sink {tuple(self.sink[0])} {self.sink[1]}" if self.sink else "no sink"]
        for shape, dtype, _ in self.latents or ():
            parts.append(f"latents {tuple(shape)} {dtype}")
        parts += [f"layout {hash(self.layout):x}"] if self.layout else []
        if self.memory is not None:
            fraction, is_full = self.memory
            parts += [f"the {'second' if is_full else 'first'} pass of {fraction:g}"]
        parts += ["with its log-sum-exp"] if self.returns_lse else []
        parts += ["with a backward" if self.has_backward else "without a backward"]
        return ", ".join(parts + ["deterministic"] * self.is_deterministic)


class CallSignature(NamedTuple):
    """All of a call but the values of its tensors, its scale and its memory."""

    q: torch.Size  # [batch, local tokens, query heads, dk]
    k: torch.Size  # [batch, local tokens, kv heads, dk]
    v: torch.Size  # [batch, local tokens, kv heads, dv]
    dtype: torch.dtype
    device: torch.device
    mask: Mask
    soft_cap: float | None
    latents: LatentShape | None
    layout: Layout | None  # of the tokens; None: the configuration's
    is_deterministic: bool  # some kernels are not

    def __str__(self) -> str:
        said = f"q {tuple(self.q)} {self.dtype}, k {tuple(self.k)}, v {tuple(self.v)}, {self.mask}"
        said += f", latents of {self.latents.size}" if self.latents else ""
        said += f", layout {hash(self.layout):x}" if self.layout else ""
        return said + ("" if self.soft_cap is None else f", soft cap {self.soft_cap}")

    def shape(self, sent_as: GradDtype) -> Shape:
        """Return what decides the bytes that are sent."""
        batch, tokens, heads, _ = self.q
        sizes = (heads, self.k[2]), (self.k[3], self.v[3])
        return Shape.of(batch * tokens, *sizes, self.dtype.itemsize, sent_as)

    def request(self, *, is_banded: bool) -> Request:
        """Return what a kernel is asked to serve."""
        return Request(
            device=self.device,
            dtype=self.dtype,
            query_heads=self.q[2],
            kv_heads=self.k[2],
            head_dim=self.k[3],
            value_head_dim=self.v[3],
            is_banded=is_banded,
            soft_cap=self.soft_cap,
            has_documents=self.mask.documents is not None,
        )
