"""The LM head and its cross entropy in chunks of tokens: the logits of all tokens never exist."""

from megatron_burst.linear_cross_entropy.function import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
