"""What is asked of one call: which function of the logits, in which chunks, over which ranks."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import Tensor

from megatron_burst.kernels.inputs import as_number
from megatron_burst.loss.chunk_size import MIB, Chunking, Sizes, choose
from megatron_burst.loss.kept import Keeper
from megatron_burst.loss.products import OwnSum, WeightSum

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The settings of `linear_cross_entropy`, and what a framework may put in."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    entropy: bool = False
    chunk_size: int | None = None
    memory_mb: float | None = None
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    weights: Tensor | None = None
    """Of targets' shape: the gradient of the losses up to a factor, as far as is known."""
    keeper: Keeper = field(default_factory=Keeper)
    weight_sum: Callable[[Tensor], WeightSum] = OwnSum  # for one backward
    on_chunking: Callable[[Chunking], None] = partial(logger.debug, "linear_cross_entropy: %s")
    on_best: Callable[[Tensor, Tensor], None] | None = None
    """Gets the largest logits among this rank's rows, and which: [parts, tokens] of a chunk."""

    def __post_init__(self) -> None:
        for name in ("label_smoothing", "z_loss", "logit_softcap", "logit_scale"):
            object.__setattr__(self, name, as_number(name, getattr(self, name)))
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss must not be negative, and finite, got {self.z_loss}")
        if self.logit_softcap is not None and not 0.0 < self.logit_softcap < math.inf:
            raise ValueError(
                f"logit_softcap must be positive and finite, or None, got {self.logit_softcap}"
            )
        if not math.isfinite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale}")
        if self.memory_mb is not None and not math.isfinite(self.memory_mb):
            raise ValueError(
                f"memory_mb must be finite, got {self.memory_mb}; chunk_size sets no limit"
            )
        if self.chunk_size is not None and self.memory_mb is not None:
            raise ValueError(
                f"chunk_size = {self.chunk_size} and memory_mb = {self.memory_mb} both say how "
                "large a chunk is: give one of them"
            )

    @property
    def statistics(self) -> int:
        """How many numbers a token's logits leave; see `InTorch.statistics`."""
        return 3 + self.entropy + bool(self.label_smoothing)

    def chunking(self, sizes: Sizes) -> Chunking:
        """Choose the chunks."""
        limit = None if self.memory_mb is None else int(self.memory_mb * MIB)
        chunking = choose(sizes, self.chunk_size, limit)
        self.on_chunking(chunking)
        return chunking
