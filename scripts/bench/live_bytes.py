"""Counts the bytes of live tensors, as `megatron-burst gpu-check` does on a CPU."""

from megatron_burst.tools.live_bytes import LiveBytes

__all__ = ["LiveBytes"]
