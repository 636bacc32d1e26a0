"""Lets a kernel that wants heads of one size serve K and V of two, by zeros in the smaller."""

from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn.functional import pad

from megatron_burst.kernels.protocol import Kernel, Request
from megatron_burst.plans.mask import Relation


@dataclass(slots=True)
class PaddedKernel:
    """Another kernel with all heads padded to one size; what travels in a ring is not padded.

    Zeros in q and k change no score, for the scale stays that of the true size; zeros in v add
    columns of zeros to the output, which are cut off again. Likewise the gradients.
    """

    inner: Kernel
    size: int  # of a head after padding
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Say by the name, which is logged, that there is padding."""
        self.name = f"{self.inner.name} with heads padded to {self.size}"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why the kernel cannot serve the padded tensors."""
        padded = replace(request, head_dim=self.size, value_head_dim=self.size)
        return self.inner.reasons_against(padded)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        relation: Relation,
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        padded_q, padded_k, padded_v = (self._pad(x) for x in (q, k, v))
        out, lse = self.inner.forward(
            padded_q, padded_k, padded_v, relation, scale, soft_cap=soft_cap
        )
        return _cut(out, v), lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        relation: Relation,
        scale: float,
        *,
        soft_cap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv); see `Kernel`."""
        dq, dk, dv = self.inner.backward(
            self._pad(dout),
            self._pad(q),
            self._pad(k),
            self._pad(v),
            self._pad(out),
            lse,
            relation,
            scale,
            soft_cap=soft_cap,
        )
        return _cut(dq, q), _cut(dk, k), _cut(dv, v)

    def _pad(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.size - x.shape[3])) if x.shape[3] < self.size else x


def _cut(x: Tensor, like: Tensor) -> Tensor:
    # A copy, so that the zeros take no memory for as long as the result lives.
    return x if x.shape[3] == like.shape[3] else x[..., : like.shape[3]].contiguous()
