"""Context-parallel attention and a chunked LM-head loss for very long sequences in Megatron-Core.

Importing this package needs torch and numpy alone; what touches Megatron lives in
`megatron_burst.plugin`.
"""

from megatron_burst.attention.autograd import ring_attention
from megatron_burst.attention.context import BurstContext
from megatron_burst.config import BurstConfig
from megatron_burst.kernels.torch_version import check_torch_version
from megatron_burst.loss.function import linear_cross_entropy
from megatron_burst.plans.mask import Mask

__all__ = ["BurstConfig", "BurstContext", "Mask", "linear_cross_entropy", "ring_attention"]

__version__ = "0.1.0"

check_torch_version()
