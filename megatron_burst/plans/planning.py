"""Chooses the schedules of one attention call by the bytes that they send; counted, not timed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from megatron_burst.config import (
    Algorithm,
    Backward,
    BurstConfig,
    GradientReturn,
    LayoutName,
)
from megatron_burst.plans.cost import Traffic, traffic
from megatron_burst.plans.direct import Direct
from megatron_burst.plans.layout import Layout, contiguous, segmented_zigzag, striped, zigzag
from megatron_burst.plans.plan import Kind, Plan
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.schedule import Schedule
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid

type Costs = Mapping[Schedule, Traffic]


@dataclass(frozen=True, slots=True)
class Choice:
    """The schedules of one attention call, and what they and others would cost a layer."""

    tiling: Tiling
    forward: Schedule
    forward_cost: Traffic
    backward: Schedule
    backward_costs: Costs  # of the best schedule for each kind of block that may be sent
    unmasked: int  # bytes a rank sends forward in a ring that everybody needs all of

    @property
    def is_banded(self) -> bool:
        """Whether any rank has tiles that are neither full nor causal squares."""
        return self.tiling.needs.is_banded

    def plans(self, rank: int) -> tuple[Plan, Plan]:
        """Return the plans of a rank's forward and backward."""
        return self.forward.forward(rank), self.backward.backward(rank)

    def __str__(self) -> str:
        mask = self.tiling.mask
        if self.tiling.ranks == 1:
            return f"{mask}, no rings"
        instead = f" by the {self.forward.name} instead of {mib(self.unmasked)}"
        costs = {schedule: mib(cost.bottleneck) for schedule, cost in self.backward_costs.items()}
        others = (f"the {s.name} would {cost}" for s, cost in costs.items() if s != self.backward)
        return (
            f"{mask}: a layer sends {mib(self.forward_cost.rank)} a rank forward"
            f"{instead if mask.is_sparse else ''}; backward the {self.backward.name} puts "
            f"{costs[self.backward]} on the bottleneck link, {', '.join(others)}; FLOPs max/mean "
            f"{self.tiling.needs.imbalance:.3f}"
        )


def choose(
    config: BurstConfig,
    tiling: Tiling,
    grid: Grid,
    sizes: Mapping[Kind, int],
    nodes: Sequence[Hashable],
    along_grid: bool = False,
) -> Choice:
    """Choose by the bytes on the bottleneck link.

    `sizes` are the bytes of a whole item of each kind. With `along_grid`, as in adopted process
    groups, messages pass within rows and columns of the grid alone: nothing goes straight.
    """
    gather, back = config.algorithm is Algorithm.ALLGATHER, _gradient_return(config, grid, nodes)
    straight = config.algorithm is Algorithm.BURST and tiling.mask.is_sparse and not along_grid

    def costs(kind: Kind, *, backward: bool) -> Costs:
        found: list[Schedule] = [Ring(tiling, grid, kind, back, gather)]  # first the usual one
        if straight:
            found.append(Direct(tiling, grid, kind))
        local = tiling.local_tokens
        return {s: traffic(s.messages(backward=backward), sizes, nodes, local) for s in found}

    forward = costs(Kind.KV, backward=False)
    backward = {kind: costs(kind, backward=True) for kind in (Kind.KV, Kind.QUERY)}
    best = {kind: _cheaper(found) for kind, found in backward.items()}
    best_costs = {best[kind]: found[best[kind]] for kind, found in backward.items()}
    allowed = [best[kind] for kind in _sent_backward(config)]
    return Choice(
        tiling,
        _cheaper(forward),
        forward[_cheaper(forward)],
        min(allowed, key=lambda schedule: best_costs[schedule].bottleneck),
        best_costs,
        (grid.ranks - 1) * sizes[Kind.KV],
    )


def make_layout(config: BurstConfig, tokens: int, ranks: int) -> Layout:
    """Return which tokens each rank holds; ValueError if they do not divide over the ranks."""
    if config.layout is LayoutName.SEGMENTED_ZIGZAG and config.cuts_for_recompute:
        chunks, fraction = 2 * ranks, config.recompute_fraction or 0.0
        early = round(fraction * tokens / chunks) * chunks
        return segmented_zigzag([n for n in (early, tokens - early) if n], ranks)
    if config.layout is LayoutName.SEGMENTED_ZIGZAG:
        if tokens % config.segments:
            raise ValueError(
                f"{tokens} tokens do not divide into {config.segments} segments; change "
                "--seq-length or --burst-segments"
            )
        return segmented_zigzag([tokens // config.segments] * config.segments, ranks)
    makers = {
        LayoutName.ZIGZAG: zigzag,
        LayoutName.CONTIGUOUS: contiguous,
        LayoutName.STRIPED: striped,
    }
    return makers[config.layout](tokens, ranks)


def _gradient_return(config: BurstConfig, grid: Grid, nodes: Sequence[Hashable]) -> GradientReturn:
    if config.gradient_return is not GradientReturn.AUTO:
        return config.gradient_return
    leaves_the_node = grid.nodes == 1 and len(set(nodes)) > 1
    chained = config.algorithm is not Algorithm.BURST or leaves_the_node
    return GradientReturn.CHAIN if chained else GradientReturn.HOME


def _sent_backward(config: BurstConfig) -> tuple[Kind, ...]:
    if config.algorithm is not Algorithm.BURST:
        return (Kind.KV,)
    if config.backward is Backward.AUTO:
        return Kind.KV, Kind.QUERY
    return (Kind(config.backward.value),)


def _cheaper(costs: Costs) -> Schedule:
    """Return the usual schedule, or another that puts at most half as much on the bottleneck link.

    Less would not pay: messages of a direct exchange pass between any two ranks, and a rank holds
    all that it receives at once.
    """
    usual, *others = costs
    limit = costs[usual].bottleneck / 2
    return next((other for other in others if costs[other].bottleneck <= limit), usual)


def mib(count: int) -> str:
    """Write a number of bytes down for the log."""
    return f"{count / 2**20:.2f} MiB"
