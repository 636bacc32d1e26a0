"""Chooses the schedules of one attention call by the clock."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from megatron_burst.config import Algorithm, Backward, BurstConfig, Topology
from megatron_burst.plans.choice.cost import Shape, Traffic, traffic
from megatron_burst.plans.choice.fewer import Fewer
from megatron_burst.plans.choice.timing import Links, PassTime, pass_time
from megatron_burst.plans.schedules.direct import Direct
from megatron_burst.plans.schedules.mesh import Mesh, meshes
from megatron_burst.plans.schedules.plan import Kind, Plan
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Schedule
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, by_node, choose_grid
from megatron_burst.plans.visibility.layout import zigzag

TIMED = 256  # ranks of a ring that are put on the clock, which takes their square, or about
_NEAR = 1.005  # of the fastest's time; up to it a mesh comes last, and fewer bytes first
_UNEVEN = 1.05  # how much more than in the most even ring a rank may compute if nothing is timed

type _Clock = Links | Fewer | None  # fewer ranks where all are too many to be timed


class Offer(NamedTuple):
    """A schedule of a pass, and what it costs a layer."""

    schedule: Schedule
    cost: Traffic
    memory: int  # bytes that a rank has of others' blocks and results, at the most
    time: PassTime | None = None  # by the clock, where it is what decides

    def __str__(self) -> str:
        return f"the {self.schedule.name} {mib(self.cost.bottleneck)}"

    @property
    def order(self) -> tuple[int, int, int]:
        """By which the best is chosen: the bytes on the bottleneck link, of a rank, then memory."""
        return self.cost.bottleneck, self.cost.rank, self.memory


@dataclass(frozen=True, slots=True)
class Choice:
    """The schedules of one attention call: of each pass what is taken, then the others."""

    tiling: Tiling
    forward: Sequence[Offer]
    backward: Sequence[Offer]
    unmasked: int  # bytes a rank sends forward in a ring that everybody needs all of

    @property
    def is_banded(self) -> bool:
        """Whether any rank has tiles that are neither full nor causal squares."""
        return self.tiling.needs.is_banded

    @property
    def is_direct(self) -> bool:
        """Whether a pass is a direct exchange."""
        return any(isinstance(of[0].schedule, Direct) for of in (self.forward, self.backward))

    @property
    def names(self) -> str:
        """What the log calls the schedules of the forward and the backward."""
        taken = (of[0].schedule.name for of in (self.forward, self.backward))
        return " and ".join(dict.fromkeys(taken))

    def plans(self, rank: int) -> tuple[Plan, Plan]:
        """Return the plans of a rank's forward and backward."""
        return self.forward[0].schedule.forward(rank), self.backward[0].schedule.backward(rank)

    def times(self, links: Links) -> tuple[PassTime, PassTime]:
        """Return the time of a layer's forward and backward by the clock."""
        ahead, back = self.forward[0], self.backward[0]
        return (
            ahead.time or pass_time(ahead.schedule, links, backward=False),
            back.time or pass_time(back.schedule, links, backward=True),
        )

    def __str__(self) -> str:
        mask, forward = self.tiling.mask, self.forward[0]
        if self.tiling.ranks == 1:
            return f"{mask}, nothing is sent"
        instead = f" instead of {mib(self.unmasked)}" if mask.is_sparse else ""
        memory = max(forward.memory, self.backward[0].memory)
        return (
            f"{mask}: a layer sends {mib(forward.cost.rank)} a rank forward by the "
            f"{forward.schedule.name}{instead}; on the bottleneck link forward "
            f"{_compared(self.forward)}, backward {_compared(self.backward)}; at most "
            f"{mib(memory)} are held for others; FLOPs max/mean {forward.schedule.imbalance:.3f}"
        )


def choose(
    config: BurstConfig,
    tiling: Tiling,
    grid: Grid,
    shape: Shape,
    nodes: Sequence[Hashable],
    memory_limit: float = math.inf,
    links: Links | None = None,
) -> Choice:
    """Choose the fastest on these links; of nearly equal ones a mesh last, the fewest bytes first.

    Those count alone where no links are given: on the bottleneck link, of equal ones all bytes,
    then memory; and under sparse masks for rings of more than 256 ranks. Of dense ones more ranks
    are timed by what a quarter takes.

    `memory_limit`, in bytes, is of what a rank holds for others under any schedule but a ring.

    Raises:
        ValueError: a mesh is asked for, but no mesh is possible or fits the limit.
    """
    links = links and links._replace(shape=shape)
    clocks: tuple[_Clock, _Clock] = links, links
    if config.algorithm is not Algorithm.BURST:
        clocks = None, None
    elif links and tiling.ranks > (
        TIMED if tiling.mask.is_sparse else max(TIMED, _ranks_of_fewer(nodes))
    ):
        clocks = _of_fewer(config, tiling, shape, nodes, memory_limit, links)
    arguments = config, tiling, grid, nodes, shape, memory_limit
    forward = _Pass(*arguments, clocks[0], backward=False).offers()
    backward = _Pass(*arguments, clocks[1], backward=True).offers()
    unmasked = (grid.ranks - 1) * shape.item_bytes()[Kind.KV]
    return Choice(tiling, forward, backward, unmasked)


def _ranks_of_fewer(nodes: Sequence[Hashable]) -> int:
    """Return how many ranks stand for more: of nodes that make a mesh of the same form, or any."""
    node_ranks = by_node(nodes)
    count, on_a_node = len(node_ranks), len(node_ranks[0])
    while count * on_a_node > TIMED and count % 4 == 0:
        count //= 4
    most = max(4, TIMED // on_a_node // 2 * 2)
    makes_a_mesh = any(count % n == 0 for n in range(2, count))
    return (count if makes_a_mesh and count <= most else most) * on_a_node


def _of_fewer(
    config: BurstConfig,
    tiling: Tiling,
    shape: Shape,
    nodes: Sequence[Hashable],
    memory_limit: float,
    links: Links,
) -> tuple[Fewer, Fewer] | tuple[None, None]:
    """Time passes of fewer nodes; nothing if they are unequal, or the mask sparse.

    Of 288 to 1024 ranks on H100, A800 and slower networks, 12 situations each, a layer by what is
    chosen so takes by the clock 0.2 to 0.8 % longer than by the fastest in the mean, at most 8 %.
    """
    node_ranks = by_node(nodes)
    on_a_node = len(node_ranks[0])
    if tiling.mask.is_sparse or any(len(row) != on_a_node for row in node_ranks):
        return None, None
    fewer = [rank // on_a_node for rank in range(_ranks_of_fewer(nodes))]
    local_tokens = tiling.local_tokens + tiling.local_tokens % 2  # other layouts' may be odd
    layout = zigzag(local_tokens * len(fewer), len(fewer))
    grid, _ = choose_grid(config.shape_of_rings, fewer)
    shape = replace(shape, tokens=shape.tokens // tiling.local_tokens * local_tokens)
    links = Links.of(fewer, shape, links.machine, links.beside)
    choice = choose(config, Tiling(layout, tiling.mask), grid, shape, fewer, memory_limit, links)

    def timed(offers: Sequence[Offer]) -> Fewer:
        known = {(type(x.schedule), x.schedule.sent): (x.cost, x.time) for x in offers if x.time}
        return Fewer(known, len(nodes) / len(fewer), links.machine)

    return timed(choice.forward), timed(choice.backward)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward or a backward that wants a schedule; see `choose`."""

    config: BurstConfig
    tiling: Tiling
    grid: Grid
    nodes: Sequence[Hashable]
    shape: Shape
    memory_limit: float  # bytes
    clock: _Clock
    backward: bool

    def offers(self) -> Sequence[Offer]:
        """Return what is taken, then the others."""
        mesh = [*self._mesh()]
        if mesh and self.config.topology is Topology.MESH:
            return self._fastest_first(mesh)
        rings, by_cost = [self._offer(ring) for ring in self._rings()], attrgetter("order")
        least = min(ring.schedule.pairs.max() for ring in rings)

        def is_even(offer: Offer) -> bool:
            is_timed = isinstance(self.clock, Links)  # with the busiest rank
            return is_timed or bool(offer.schedule.pairs.max() <= _UNEVEN * least)

        def is_worth_it(offer: Offer) -> bool:
            cost, ring, schedule = offer.cost, usual.cost, offer.schedule
            cheap = (
                self.clock is not None
                or cost.bottleneck <= schedule.worth * ring.bottleneck
                or (
                    cost.bottleneck <= ring.bottleneck
                    and cost.rank <= schedule.worth_in_all * ring.rank
                )
            )
            return cheap and is_even(offer) and offer.memory <= self.memory_limit

        usual = min(filter(is_even, rings), key=by_cost)
        others = [*map(self._offer, self._direct()), *mesh]
        taken = [*filter(is_even, rings), *filter(is_worth_it, others)]
        left = [offer for offer in (*rings, *others) if offer not in taken]
        return [*self._fastest_first(sorted(taken, key=by_cost)), *sorted(left, key=by_cost)]

    def _fastest_first(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """Put the fastest first, or the first that is nearly as fast; as they are without links."""
        if self.clock is None or len(offers) < 2:
            return offers
        # A mesh holds and merges more: it has to be faster.
        offers = sorted(offers, key=lambda x: isinstance(x.schedule, Mesh))
        if isinstance(self.clock, Fewer):
            seconds = [self.clock.seconds(x.schedule, x.cost) for x in offers]
        else:
            times = [pass_time(x.schedule, self.clock, backward=self.backward) for x in offers]
            offers = [x._replace(time=time) for x, time in zip(offers, times, strict=True)]
            seconds = [time.seconds for time in times]
        first = next(n for n, each in enumerate(seconds) if each <= _NEAR * min(seconds))
        return [offers[first], *offers[:first], *offers[first + 1 :]]

    def _offer(self, schedule: Schedule, cost: Traffic | None = None) -> Offer:
        if cost is None:
            messages = schedule.messages(backward=self.backward)
            cost = traffic(messages, self._sizes, self.nodes, self.tiling.local_tokens)
        return Offer(schedule, cost, schedule.memory(self._sizes, backward=self.backward))

    @property
    def _sizes(self) -> Mapping[Kind, int]:
        return self.shape.item_bytes(backward=self.backward)

    def _kinds(self) -> tuple[Kind, ...]:
        """What may circulate."""
        if not self.backward or self.config.algorithm is not Algorithm.BURST:
            return (Kind.KV,)
        if self.config.backward is Backward.AUTO:
            return Kind.KV, Kind.QUERY
        return (Kind(self.config.backward.value),)

    def _rings(self) -> Iterator[Ring]:
        gather = self.config.algorithm is Algorithm.ALLGATHER
        for kind in self._kinds():
            ring = Ring(self.tiling, self.grid, kind, gather=gather)
            yield replace(ring, chained=self._is_chained(ring))

    def _is_chained(self, ring: Ring) -> bool:
        """Of baselines, where a flat ring leaves the node, and on nodes of one rank if as cheap.

        In such a flat ring every part would leave the node. On nodes of one rank the chain sends as
        much if a part is as wide as a sum and no mask spares rows, and rounds no more in float32.
        """
        if self.config.algorithm is not Algorithm.BURST:
            return True
        if self.grid.nodes == 1:
            return len(set(self.nodes)) > 1
        sends_as_much = self._sizes[ring.returned] == self._sizes[ring.sent.gradient]
        sends_as_much &= not self.tiling.mask.is_sparse
        is_wide = self.shape.gradient_bytes >= 4  # float32, which a hop does not round to 16 bits
        return self.grid.ranks_per_node == 1 and sends_as_much and is_wide

    def _direct(self) -> Iterator[Direct]:
        """Only of sparse masks; what goes straight keeps to no row or column."""
        is_burst, is_sparse = self.config.algorithm is Algorithm.BURST, self.tiling.mask.is_sparse
        if is_burst and is_sparse:
            yield from (Direct(self.tiling, self.grid, kind) for kind in self._kinds())

    def _mesh(self) -> Iterator[Offer]:
        """Those of fewest bytes, if everybody needed all: one, or on the clock one of a kind."""
        if not self.config.may_take_mesh or self.grid.ranks == 1:
            return
        if self.config.topology is Topology.AUTO and len(set(self.nodes)) == 1:
            return  # within a node links are fast, and what a mesh costs besides bytes counts
        every = [*self._meshes()]
        fitting = [offer for offer in every if offer.memory <= self.memory_limit]
        if not fitting and self.config.topology is Topology.MESH:
            memory = [offer.memory for offer in every]
            raise ValueError(_no_mesh(self.grid, memory, self.memory_limit))
        met = set[Kind]()
        for best in sorted(fitting, key=attrgetter("order")):
            if best.schedule.sent not in met and (self.clock or not met):
                met.add(best.schedule.sent)
                yield self._offer(best.schedule, self._by_formula(best.cost))

    def _meshes(self) -> Iterator[Offer]:
        """All of them, with what they would send if everybody needed all blocks."""
        for kind in self._kinds() if self.backward else (Kind.KV, Kind.QUERY):
            for mesh in meshes(self.tiling, self.grid, kind):
                away, within = mesh.sends(self._sizes, backward=self.backward)
                yield self._offer(mesh, Traffic(away + within, away))

    def _by_formula(self, sent: Traffic) -> Traffic | None:
        """Return what a mesh sends without counting, if all is needed; None if it is to be."""
        if not self.tiling.all_is_needed or self.grid.nodes != len(set(self.nodes)):
            return None
        return sent if self.grid.nodes > 1 else replace(sent, nic=0)


def _compared(offers: Sequence[Offer]) -> str:
    """Say what is taken and what the next one would put on the link."""
    taken, *others = offers
    return f"{taken}" + (f" ({others[0]})" if others else "")


def _no_mesh(grid: Grid, memory: Sequence[int], limit: float) -> str:
    count, what = (grid.nodes, "nodes") if grid.nodes > 1 else (grid.ranks, "ranks")
    if not memory:
        return (
            f"--burst-topology mesh needs {what} in rows and columns of two or more, but there "
            f"are {count}: take another --context-parallel-size, or --burst-topology auto"
        )
    return (
        f"--burst-topology mesh would hold at least {mib(min(memory))} of other ranks' blocks, but "
        f"the limit is {mib(limit)}: raise --burst-memory-mb, or take --burst-topology auto"
    )


def mib(count: float) -> str:
    """Write a number of bytes down for the log."""
    return f"{count / 2**20:.2f} MiB"
