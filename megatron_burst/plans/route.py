"""The way that the blocks of all ranks take, the same for each: stages between stations.

Station 0 of a block is its owner, station p·L + s the rank p nodes and s places on. So one short
list describes the messages of all ranks, and those of one rank are found without the others'.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_burst.plans.layout import Interval
from megatron_burst.plans.plan import Channel, Hop, Item, Kind
from megatron_burst.plans.schedule import Loads


class Stage(NamedTuple):
    """One hop of every block, or of every gradient, from one station to another."""

    source: int
    target: int
    channel: Channel
    leaves: int
    lands: int


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of all ranks that move the blocks, or the gradients, of one kind."""

    kind: Kind
    stages: Sequence[Stage]
    ranks: NDArray[np.int64]
    """[station, owner]: who is there."""
    used: NDArray[np.bool]
    """[stage, owner]: whether anything goes that way."""
    parts: Sequence[Interval | None]
    """By owner: which of its rows go; None is all."""

    def hops(self, rank: int | None = None) -> list[Hop]:
        """Return all messages, or those that `rank` sends or receives, in the same order."""
        if rank is None:
            return [self._hop(i, o) for o, i in np.argwhere(self.used.T).tolist()]
        at: dict[int, list[int]] = defaultdict(list)  # station -> its stages
        for number, stage in enumerate(self.stages):
            at[stage.source].append(number)
            at[stage.target].append(number)
        station = np.argmax(self.ranks == rank, axis=0).tolist()  # by owner
        return [self._hop(i, o) for o, t in enumerate(station) for i in at[t] if self.used[i, o]]

    def loads(self, sizes: Mapping[Kind, int], local_tokens: int) -> Loads:
        """Yield senders, receivers and bytes, a stage of all owners at a time."""
        rows = np.array([local_tokens if part is None else part.length for part in self.parts])
        payload = sizes[self.kind] * rows // local_tokens
        for stage, used in zip(self.stages, self.used, strict=True):
            yield self.ranks[stage.source], self.ranks[stage.target], payload * used

    def _hop(self, number: int, owner: int) -> Hop:
        stage, item = self.stages[number], Item(self.kind, owner, self.parts[owner])
        source, target = self.ranks[stage.source, owner], self.ranks[stage.target, owner]
        return Hop(item, int(source), int(target), stage.channel, stage.leaves, stage.lands)


def used_by_blocks(stages: Sequence[Stage], useful: NDArray[np.bool]) -> NDArray[np.bool]:
    """Say which stages lead a block on to a station where it is useful; both by owner."""
    useful, used = useful.copy(), np.zeros((len(stages), useful.shape[1]), bool)
    for number, stage in reversed([*enumerate(stages)]):
        used[number] = useful[stage.target]
        useful[stage.source] |= used[number]
    return used


def used_by_gradients(stages: Sequence[Stage], useful: NDArray[np.bool]) -> NDArray[np.bool]:
    """Say which stages carry something that a station has added to the gradient; both by owner."""
    holding, used = useful.copy(), np.zeros((len(stages), useful.shape[1]), bool)
    for number, stage in enumerate(stages):
        used[number] = holding[stage.source]
        holding[stage.source] = False
        holding[stage.target] |= used[number]
    return used
