"""Context-parallel attention for pretraining on very long sequences, as a Megatron-Core plug-in.

Importing this package needs torch alone; what touches Megatron lives in `megatron_burst.plugin`.
"""

from megatron_burst.config import BurstConfig
from megatron_burst.context import BurstContext
from megatron_burst.mask import Mask
from megatron_burst.ring_attention import ring_attention

__all__ = ["BurstConfig", "BurstContext", "Mask", "ring_attention"]

__version__ = "0.1.0"
