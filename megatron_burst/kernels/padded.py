"""Lets a kernel that wants heads of one size serve K and V of two, by zeros in the smaller."""

from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn.functional import pad

from megatron_burst.kernels.protocol import Gradients, Kernel, KernelInput, Request


@dataclass(slots=True)
class PaddedKernel:
    """Another kernel with all heads padded to one size; what a ring sends is not padded.

    Zeros in q and k change no score, for the scale stays that of the true size; zeros in v add
    columns of zeros to the output, which are cut off again. Likewise the gradients.
    """

    inner: Kernel
    size: int  # of a head after padding
    name: str = field(init=False)  # is logged

    def __post_init__(self) -> None:
        self.name = f"{self.inner.name} with heads padded to {self.size}"

    def reasons_against(self, request: Request) -> list[str]:
        """Return why the kernel cannot serve the padded tensors."""
        padded = replace(request, head_dim=self.size, value_head_dim=self.size)
        return self.inner.reasons_against(padded)

    def forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        """Return (out, lse); see `Kernel`."""
        out, lse = self.inner.forward(self._padded(tile))
        return _cut(out, tile.v), lse

    def backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return (dq, dk, dv); see `Kernel`."""
        gradients = self.inner.backward(self._padded(tile), self._pad(dout), self._pad(out), lse)
        dq, dk, dv = map(_cut, gradients, tile.qkv)
        return dq, dk, dv

    def _padded(self, tile: KernelInput) -> KernelInput:
        q, k, v = map(self._pad, tile.qkv)
        return replace(tile, q=q, k=k, v=v)

    def _pad(self, x: Tensor) -> Tensor:
        return pad(x, (0, self.size - x.shape[3])) if x.shape[3] < self.size else x


def _cut(x: Tensor, like: Tensor) -> Tensor:
    # A copy, so that the zeros take no memory for as long as the result lives.
    return x if x.shape[3] == like.shape[3] else x[..., : like.shape[3]].contiguous()
