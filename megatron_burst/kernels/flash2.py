"""FlashAttention-2 from the package flash-attn, for NVIDIA GPUs."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_burst.kernels.package import Package
from megatron_burst.kernels.packed import InSequences, flash_settings
from megatron_burst.kernels.protocol import Gradients, KernelInput
from megatron_burst.kernels.requirements import DeclaredKernel

# The signatures are those of 2.7.0 and later; Blackwell was refused before 2.7.4.
PACKAGE = Package("flash-attn", "flash_attn.flash_attn_interface", "2.7.4", "2.9")


class Flash2Kernel(InSequences, DeclaredKernel):
    """flash-attn 2: windows, soft caps and a deterministic backward."""

    name = "flash2"
    package: Package = PACKAGE
    has_soft_cap = True
    always: ClassVar[Mapping[str, Any]] = {"dropout_p": 0.0, "alibi_slopes": None}
    causal_backward = "causal"  # what the backward calls it
    of_several = "_flash_attn_varlen_"  # how the functions' names begin

    def of_forward(self, tile: KernelInput) -> Mapping[str, Any]:
        """Return what is said to the forward alone."""
        return {"return_softmax": False}

    def _forward(self, tile: KernelInput) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._function("forward", tile)(
            *tile.qkv, causal=tile.is_causal, **self._settings(tile), **self.of_forward(tile)
        )
        return out, lse

    def _backward(self, tile: KernelInput, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        dq, dk, dv = (torch.empty_like(x) for x in tile.qkv)
        self._function("backward", tile)(
            *(dout, *tile.qkv, out, lse),
            **{"dq": dq, "dk": dk, "dv": dv, self.causal_backward: tile.is_causal},
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._settings(tile),
        )
        return dq, dk, dv

    def _function(self, phase: str, tile: KernelInput) -> Any:
        begin = "_flash_attn_" if tile.packing is None else self.of_several
        return getattr(self.package.functions(), begin + phase)

    def _settings(self, tile: KernelInput) -> dict[str, Any]:
        return {**flash_settings(tile, -1), "softcap": tile.soft_cap or 0.0, **self.always}
