"""Attention over a sequence that is spread across ranks."""

from megatron_burst.ring_attention.autograd import ring_attention

__all__ = ["ring_attention"]
