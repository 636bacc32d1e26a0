"""Into how many chunks of tokens an MLP is cut where the flag does not say."""

from math import ceil

_FEWEST_TOKENS = 2048  # of a chunk: products of fewer rows do not fill a GPU


def choose_mlp_chunks(tokens: int, hidden: int, between: float) -> int:
    """Return how many make what lives between the two products no more than the hidden states.

    A token has `hidden` numbers there, and `between` that the first product makes or the second
    takes, which gradients double at most.
    """
    return min(max(1, tokens // _FEWEST_TOKENS), ceil(2 * between / hidden))
