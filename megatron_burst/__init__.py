"""Context-parallel attention and a chunked LM-head loss for very long sequences in Megatron-Core.

Importing this package loads nothing; its names need torch and numpy alone, and what touches
Megatron lives in `megatron_burst.plugin`.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_burst.attention.autograd import ring_attention as ring_attention
    from megatron_burst.attention.context import BurstContext as BurstContext
    from megatron_burst.attention.latent_attention import (
        latent_ring_attention as latent_ring_attention,
    )
    from megatron_burst.config import BurstConfig as BurstConfig
    from megatron_burst.loss.function import linear_cross_entropy as linear_cross_entropy
    from megatron_burst.plans.visibility.mask import Mask as Mask

if sys.version_info < (3, 12):  # noqa: UP036 - from a checkout, where no pip refuses it
    raise ImportError(f"megatron_burst needs Python 3.12 or newer, this is {sys.version}")

__version__ = "0.1.0"

_HOMES = {
    "BurstConfig": "config",
    "BurstContext": "attention.context",
    "Mask": "plans.visibility.mask",
    "latent_ring_attention": "attention.latent_attention",
    "linear_cross_entropy": "loss.function",
    "ring_attention": "attention.autograd",
}
__all__ = list(_HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Load a public name when it is asked for: `megatron-burst launch` runs where no torch is."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
