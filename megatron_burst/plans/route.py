"""The way that the blocks of all ranks take, the same for each: legs between stations.

Of a ring, station 0 of a block is its owner, station p·L + s the rank p nodes and s places on. So
one short list describes the messages of all ranks, and those of one rank are found without the
others'.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Channel, Hop, Item, Kind
from megatron_burst.plans.schedule import Loads

type Used = Callable[[Sequence[Leg], NDArray[np.bool]], NDArray[np.bool]]
"""Says by owner which legs are used, from the stations where the block is."""


class Leg(NamedTuple):
    """One hop of every block, or of every result, from one station to another."""

    source: int
    target: int
    channel: Channel
    leaves: int
    lands: int


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of all ranks that move the blocks, or the results, of one kind."""

    kind: Kind
    legs: Sequence[Leg]
    ranks: NDArray[np.int64]
    """[station, owner]: who is there; a rank may be at several stations of an owner."""
    used: NDArray[np.bool]
    """[leg, owner]: whether anything goes that way."""
    parts: Sequence[Interval | None]
    """By owner: which of its rows go; None is all."""

    def hops(self, rank: int | None = None) -> list[Hop]:
        """Return all messages, or those that `rank` sends or receives, in the same order."""
        if rank is None:
            return [self._hop(i, o) for o, i in np.argwhere(self.used.T).tolist()]
        at: dict[int, list[int]] = defaultdict(list)  # station -> its legs
        for number, leg in enumerate(self.legs):
            at[leg.source].append(number)
            at[leg.target].append(number)
        stations = np.argwhere((self.ranks == rank).T).tolist()
        ours = sorted({(owner, number) for owner, station in stations for number in at[station]})
        return [self._hop(number, owner) for owner, number in ours if self.used[number, owner]]

    def loads(self, sizes: Mapping[Kind, int], local_tokens: int) -> Loads:
        """Yield senders, receivers and bytes, a leg of all owners at a time."""
        rows = np.array([local_tokens if part is None else part.length for part in self.parts])
        payload = sizes[self.kind] * rows // local_tokens
        for leg, used in zip(self.legs, self.used, strict=True):
            yield self.ranks[leg.source], self.ranks[leg.target], payload * used

    def _hop(self, number: int, owner: int) -> Hop:
        leg, item = self.legs[number], Item(self.kind, owner, self.parts[owner])
        source, target = self.ranks[leg.source, owner], self.ranks[leg.target, owner]
        return Hop(item, int(source), int(target), leg.channel, leg.leaves, leg.lands)


def used_by_blocks(legs: Sequence[Leg], useful: NDArray[np.bool]) -> NDArray[np.bool]:
    """Say which legs lead a block on to a station where it is useful; both by owner."""
    useful, used = useful.copy(), np.zeros((len(legs), useful.shape[1]), bool)
    for number, leg in reversed([*enumerate(legs)]):
        used[number] = useful[leg.target]
        useful[leg.source] |= used[number]
    return used


def used_by_results(legs: Sequence[Leg], useful: NDArray[np.bool]) -> NDArray[np.bool]:
    """Say which legs carry something that a station has added to the result; both by owner."""
    holding, used = useful.copy(), np.zeros((len(legs), useful.shape[1]), bool)
    for number, leg in enumerate(legs):
        used[number] = holding[leg.source]
        holding[leg.source] = False
        holding[leg.target] |= used[number]
    return used
