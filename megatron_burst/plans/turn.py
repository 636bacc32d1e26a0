"""In which step a block that goes around is computed, where one kernel call may take several."""

from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """Blocks that come one after the other: the first is there, then as many as a call takes."""

    length: int
    blocks_per_call: int = 1

    @property
    def calls(self) -> Sequence[int]:
        """How many blocks come for each step but the first."""
        whole, rest = divmod(self.length - 1, self.blocks_per_call)
        return [self.blocks_per_call] * whole + [rest] * (rest > 0)

    @property
    def most(self) -> int:
        """How many blocks it has buffers for, at the most.

        Several of a step may be of two calls, each with buffers of its own.
        """
        several = 3 * self.blocks_per_call if self.blocks_per_call > 1 else 2
        return min(several, max(2, 2 * self.length - 2))

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return 1 - (1 - self.length) // self.blocks_per_call

    def step(self, station: int) -> int:
        """Return the step of a station, counted over turns that follow each other."""
        turns, place = divmod(station, self.length)
        return turns * self.steps - (-place // self.blocks_per_call)
