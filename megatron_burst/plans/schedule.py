"""What makes the plans of all ranks of an attention call."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from megatron_burst.plans.plan import Hop, Plan, Tile, assemble
from megatron_burst.plans.tiles import Tiling


class Schedule(ABC):
    """The messages of all ranks and the tiles of each; a new way to send is a class of these.

    It is a value: equal schedules make equal plans, on every rank.
    """

    __slots__ = ()

    tiling: Tiling
    """Who computes what."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in the log."""

    @abstractmethod
    def reads(self) -> list[Hop]:
        """Return the hops of all blocks, in the forward or in the backward."""

    @abstractmethod
    def gradients(self) -> list[Hop]:
        """Return the hops of all gradients of a backward."""

    @abstractmethod
    def tiles(self, rank: int, *, backward: bool) -> dict[int, Sequence[Tile]]:
        """Return what a rank computes, by step."""

    def hops(self, *, backward: bool) -> list[Hop]:
        """Return all messages of a forward or a backward."""
        return [*self.reads(), *(self.gradients() if backward else ())]

    def forward(self, rank: int) -> Plan:
        """Return a rank's plan of the forward."""
        return assemble(rank, self.hops(backward=False), self.tiles(rank, backward=False))

    def backward(self, rank: int) -> Plan:
        """Return a rank's plan of the backward.

        The gradient of what is sent returns to its owner; that of what stays is summed in place.
        """
        return assemble(rank, self.hops(backward=True), self.tiles(rank, backward=True))
