"""What a layer with a state sends: states, or channels by Megatron's all-to-all over heads."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, kw_only=True)
class ScanShape:
    """What a layer sends by; heads and channels are those of one tensor-parallel rank."""

    state: int  # numbers of the states of all heads
    transition: int  # numbers by which a rank's tokens change them
    width: int  # tokens under the convolution
    convolved: int  # channels of it
    projected: int  # channels that the projection before the scan makes
    out: int  # channels behind the scan

    def by_states(self, ranks: int, number_bytes: int) -> int:
        """Return the bytes a sequence that a rank sends at the most forward; backward no T.

        A number of an activation has so many bytes, one of a state four.
        """
        halo = (self.width - 1) * self.convolved * number_bytes
        return (ranks - 1) * 4 * (self.state + self.transition) + halo

    def by_heads(self, tokens: int, ranks: int, number_bytes: int) -> int:
        """Return those of the all-to-all with `tokens` a rank, forward as backward."""
        return tokens * (self.projected + self.out) * number_bytes * (ranks - 1) // ranks

    def fewer_from(self, ranks: int, number_bytes: int) -> int:
        """Return from how many tokens a rank on passing states sends no more."""
        a_token = self.by_heads(ranks, ranks, number_bytes) / ranks
        return ceil(self.by_states(ranks, number_bytes) / a_token)
