"""The way that the blocks of all ranks take, the same for each: legs between stations.

Of a ring, station 0 of a block is its owner, station p·L + s the rank p nodes and s places on. So
one short list describes the messages of all ranks, and those of one rank are found without the
others'.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_burst.plans.schedules.needs import part_of
from megatron_burst.plans.schedules.plan import Channel, Hop, Item, Kind
from megatron_burst.plans.schedules.schedule import Loads
from megatron_burst.plans.visibility.band import Bools, Ints

type Used = Callable[[Sequence[Leg], Bools], Bools]
"""Says by owner which legs are used, from the stations where the block is."""


class Leg(NamedTuple):
    """One hop of every block, or of every result, from one station to another."""

    kind: Kind
    source: int
    target: int
    channel: Channel
    leaves: int
    lands: int


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of all ranks that move the blocks of one kind, or their results."""

    legs: Sequence[Leg]
    ranks: Ints
    """[station, owner]: who is there; a rank may be at several stations of an owner."""
    used: Bools
    """[leg, owner]: whether anything goes that way."""
    parts: Ints
    """[pass, owner, 2]: which of its rows go, see `part_of`. Of one pass: in all."""
    length: int | None = None
    """L, if legs between stations that are as far from each other lead from rank to rank alike."""

    def hops(self, rank: int | None = None) -> list[Hop]:
        """Return all messages, or those that `rank` sends or receives, in the same order."""
        if rank is None:
            return self._hops(np.argwhere(self.used.T).tolist())
        at: dict[int, list[int]] = defaultdict(list)  # station -> its legs
        for number, leg in enumerate(self.legs):
            at[leg.source].append(number)
            at[leg.target].append(number)
        places = zip(*(axis.tolist() for axis in np.nonzero(self.ranks == rank)), strict=True)
        ours = sorted({(owner, leg) for station, owner in places for leg in at[station]})
        owners, legs = np.array(ours, np.int64).reshape(-1, 2).T
        return self._hops(itertools.compress(ours, self.used[legs, owners].tolist()))

    def loads(self, sizes: Mapping[Kind, int], local_tokens: int, *, summed: bool = False) -> Loads:
        """Return all of them, [leg, owner]; summed, legs that lead as far as each other as one."""
        starts, stops = np.moveaxis(self.parts, 2, 0)
        rows = np.where(stops > 0, stops - starts, local_tokens)  # [pass, owner]
        legs = [(sizes[leg.kind], *leg[1:3], *leg[4:]) for leg in self.legs]
        size, sources, targets, *steps = np.array(legs, np.int64).reshape(-1, 5).T
        if not (summed and self.length and self.used.all() and (rows == local_tokens).all()):
            of_legs = rows[[self._pass_of(leg) for leg in self.legs]]
            payload = size[:, None] * of_legs // local_tokens * self.used
            return Loads(self.ranks[sources], self.ranks[targets], payload, *steps)
        ends = np.array(np.divmod((sources, targets), self.length))  # [pass and step, end, leg]
        shape = [[len(self.ranks) // self.length], [self.length]]
        way = np.ravel_multi_index((ends[:, 1] - ends[:, 0]) % shape, np.ravel(shape).tolist())
        _, first, times = np.unique(way, return_index=True, return_counts=True)
        steps = [step[first] for step in steps]
        ends_of = self.ranks[sources[first]], self.ranks[targets[first]]
        return Loads(*ends_of, np.outer(times * size[first], rows[0] // local_tokens), *steps)

    def _hops(self, pairs: Iterable[Sequence[int]]) -> list[Hop]:
        """Return these messages, by owner and leg."""
        each = [(owner, self.legs[leg]) for owner, leg in pairs]
        owners = np.array([owner for owner, _ in each], np.int64)
        ends = np.array([leg[1:3] for _, leg in each], np.int64).reshape(-1, 2).T
        parts = self.parts[[self._pass_of(leg) for _, leg in each], owners]
        hops = zip(each, parts, *self.ranks[ends, owners].tolist(), strict=True)
        return [
            Hop(Item(leg.kind, owner, part_of(part)), *ends, *leg[3:])
            for (owner, leg), part, *ends in hops
        ]

    def _pass_of(self, leg: Leg) -> int:
        """Return in which pass around nodes it is; a leg between nodes leads into it, or out."""
        return 0 if len(self.parts) == 1 else max(leg.source, leg.target) // (self.length or 1)


def used_by_blocks(legs: Sequence[Leg], useful: Bools) -> Bools:
    """Say which legs lead a block on to a station where it is useful; both by owner."""
    useful, used = useful.copy(), np.zeros((len(legs), useful.shape[1]), bool)
    for number, leg in reversed([*enumerate(legs)]):
        used[number] = useful[leg.target]
        useful[leg.source] |= used[number]
    return used


def used_by_results(legs: Sequence[Leg], useful: Bools) -> Bools:
    """Say which legs carry something that a station has added to the result; both by owner."""
    holding, used = useful.copy(), np.zeros((len(legs), useful.shape[1]), bool)
    for number, leg in enumerate(legs):
        used[number] = holding[leg.source]
        holding[leg.source] = False
        holding[leg.target] |= used[number]
    return used
