"""FlashAttention-3 from the package flash_attn_3, for Hopper GPUs."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from megatron_burst.kernels.flash2 import Flash2Kernel
from megatron_burst.kernels.package import Package
from megatron_burst.kernels.protocol import KernelInput, Request

# Before 3.0.0 signatures changed while the version stayed 3.0.0b1.
PACKAGE = Package("flash_attn_3", "flash_attn_interface", "3.0.0", "3.1")


class Flash3Kernel(Flash2Kernel):
    """flash-attn 3, called as 2 is: it has MLA's usual head sizes, too."""

    name = "flash3"
    package = PACKAGE
    gpus = (9, 9)
    one_head_size = False
    always: ClassVar[Mapping[str, Any]] = {}
    causal_backward = "is_causal"
    of_several = "_flash_attn_"
    sms_for_messages = 8  # of an H100's 132: NCCL has one block on each that it uses

    def of_forward(self, tile: KernelInput) -> Mapping[str, Any]:
        """Return how many SMs the forward leaves to messages.

        It holds one block on every SM to its end. A message that comes after it waits for that, and
        blocks whose SM a message has got first begin with their share when the others are through.
        """
        return {"sm_margin": self.sms_for_messages if tile.leaves_room else 0}

    def _more_reasons(self, request: Request) -> Iterator[str]:
        k, v = request.head_dim, request.value_head_dim
        if k != v and not (128 < k <= 192 and 96 < v <= 128):
            yield (
                f"head sizes of K and V differ ({k} and {v}), and are not 136 to 192 and 104 to 128"
            )
        if max(k, v) > 192 and torch.are_deterministic_algorithms_enabled():
            yield "its backward is not deterministic for head sizes above 192"
