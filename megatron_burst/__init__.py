"""Context-parallel attention and a chunked LM-head loss for very long sequences in Megatron-Core.

Importing this package needs torch and numpy alone; what touches Megatron lives in
`megatron_burst.plugin`.
"""

from megatron_burst.config import BurstConfig
from megatron_burst.context import BurstContext
from megatron_burst.linear_cross_entropy import linear_cross_entropy
from megatron_burst.mask import Mask
from megatron_burst.ring_attention import ring_attention
from megatron_burst.torch_version import check_torch_version

__all__ = ["BurstConfig", "BurstContext", "Mask", "linear_cross_entropy", "ring_attention"]

__version__ = "0.1.0"

check_torch_version()
