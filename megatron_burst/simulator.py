"""Carry out the plans of all ranks on symbols, without processes, and fail where they are wrong."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_burst.plan import (
    Item,
    Kind,
    Plan,
    Step,
    Tile,
    blocks_of_tile,
    gradients_of_tile,
)

type _Sum = Counter[Tile]
type _Channel = tuple[int, int]  # from, to


class PlanError(Exception):
    """A set of plans that would hang or compute something wrong."""


def simulate(plans: Sequence[Plan], *, backward: bool, pairs: int | None = None) -> None:
    """Run one plan a rank and check that together they do the whole work, once.

    Checked: no tile is computed twice, and all together make up the `pairs` of tokens that the mask
    lets through, where these are given; a send meets a receive of the same item in the same order,
    nobody waits for ever, a tile reads only blocks that its rank has, nothing is left over, and
    (backward) every gradient is at home at the end with each tile's partial in it exactly once.

    Raises:
        PlanError: with the rank, the step and the item.
    """
    machine = _Machine([_Rank(plan, backward) for plan in plans])
    while any(not rank.done for rank in machine.ranks):
        if not any([machine.advance(rank) for rank in machine.ranks]):
            waiting = [f"rank {r.plan.rank} in step {r.step}" for r in machine.ranks if not r.done]
            raise PlanError(f"nobody can go on: {', '.join(waiting)}")
    machine.check_nothing_left()
    _check_tiles([tile for plan in plans for tile in plan.tiles], pairs)
    if backward:
        _check_gradients(machine.ranks)


@dataclass
class _Rank:
    plan: Plan
    backward: bool
    step: int = 0
    posted: bool = False
    blocks: set[Item] = field(default_factory=set)
    sums: dict[Item, _Sum] = field(default_factory=lambda: defaultdict(Counter))

    def __post_init__(self) -> None:
        self.blocks = {Item(Kind.KV, self.plan.rank), Item(Kind.QUERY, self.plan.rank)}

    @property
    def done(self) -> bool:
        return self.step == len(self.plan.steps)

    @property
    def current(self) -> Step:
        return self.plan.steps[self.step]

    def compute(self) -> None:
        for tile in self.current.tiles:
            for item in blocks_of_tile(tile):
                self.need(item in self.blocks, f"computes with {item}, which it does not have")
            if self.backward:
                for item in gradients_of_tile(tile):
                    self.sums[item][tile] += 1

    def need(self, condition: bool, what: str) -> None:
        if not condition:
            raise PlanError(f"rank {self.plan.rank}, step {self.step}: {what}")


@dataclass
class _Machine:
    ranks: list[_Rank]
    wires: dict[_Channel, deque[tuple[Item, _Sum]]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def advance(self, rank: _Rank) -> bool:
        """Post the rank's step, or finish it if all it waits for is there; say if it moved."""
        if rank.done:
            return False
        if not rank.posted:
            self._post(rank)
            return True
        wanted = Counter((t.peer, rank.plan.rank) for t in rank.current.receives)
        if any(len(self.wires[channel]) < count for channel, count in wanted.items()):
            return False
        self._finish(rank)
        return True

    def _post(self, rank: _Rank) -> None:
        for item, peer in rank.current.sends:
            gradient = item.kind.is_gradient
            rank.need(item in (rank.sums if gradient else rank.blocks), f"sends no {item}")
            payload = rank.sums.pop(item) if gradient else Counter[Tile]()
            self.wires[rank.plan.rank, peer].append((item, payload))
        rank.compute()
        rank.posted = True

    def _finish(self, rank: _Rank) -> None:
        for item, peer in rank.current.receives:
            gradient = item.kind.is_gradient
            arrived, payload = self.wires[peer, rank.plan.rank].popleft()
            rank.need(arrived == item, f"expects {item} from {peer}, gets {arrived}")
            if gradient:
                rank.sums[item].update(payload)
            else:
                rank.need(item not in rank.blocks, f"gets {item} twice")
                rank.blocks.add(item)
        rank.blocks -= set(rank.current.release)
        rank.step, rank.posted = rank.step + 1, False

    def check_nothing_left(self) -> None:
        for (source, peer), wire in self.wires.items():
            if wire:
                raise PlanError(f"rank {source} sends {wire[0][0]} that rank {peer} never takes")


def _check_tiles(tiles: Sequence[Tile], pairs: int | None) -> None:
    for tile, times in Counter(tiles).items():
        if times > 1:
            raise PlanError(f"{tile} is computed {times} times")
    found = sum(tile.pairs for tile in tiles)
    if pairs is not None and found != pairs:
        raise PlanError(f"the tiles have {found} pairs of tokens, the mask {pairs}")


def _check_gradients(ranks: Sequence[_Rank]) -> None:
    """Each tile adds to its query's and its key's gradient; both must be at home, once."""
    expected: dict[Item, _Sum] = defaultdict(Counter)
    for rank in ranks:
        for tile in rank.plan.tiles:
            for item in gradients_of_tile(tile):
                expected[item][tile] += 1
    found = {item: total for rank in ranks for item, total in rank.sums.items()}
    for rank in ranks:
        for item in rank.sums:
            rank.need(item.owner == rank.plan.rank, f"still has {item} at the end")
    for item, total in expected.items():
        if found.get(item) != total:
            raise PlanError(f"{item} ends with {found.get(item)}, expected {total}")
