"""Chooses the plans of one attention call: what travels, and by which way; counted, not timed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from megatron_burst.config import (
    Algorithm,
    Backward,
    BurstConfig,
    GradientReturn,
    LayoutName,
)
from megatron_burst.plans.cost import Traffic, imbalance, traffic
from megatron_burst.plans.direct import Direct
from megatron_burst.plans.layout import Layout, contiguous, segmented_zigzag, striped, zigzag
from megatron_burst.plans.plan import Kind, Plan
from megatron_burst.plans.rings import Ring
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid

type Way = Ring | Direct


@dataclass(frozen=True, slots=True)
class Plans:
    """One rank's plans for one length and mask."""

    forward: Plan
    backward: Plan
    is_banded: bool  # whether any rank has tiles that are neither full nor causal squares


@dataclass(frozen=True, slots=True)
class Choice:
    """What the plans of all ranks are made by, and what they cost a layer."""

    tiling: Tiling
    forward: Way
    forward_traffic: Traffic
    backward: Mapping[Kind, Way]
    backward_traffic: Mapping[Kind, Traffic]
    chosen: Kind  # what travels in the backward
    unmasked: int  # bytes a rank sends forward in a ring that everybody needs all of

    def plans(self, rank: int) -> Plans:
        """Return the plans of one rank."""
        return Plans(
            self.forward.forward(rank),
            self.backward[self.chosen].backward(rank),
            any(tile.is_banded for tile in self.tiling.all()),
        )

    def __str__(self) -> str:
        """Say what a layer sends and computes, for the log."""
        if self.tiling.ranks == 1:
            return f"{self.tiling.mask}, {self._share()}no rings"
        (other,) = set(self.backward) - {self.chosen}
        backward = {kind: mib(cost.busiest_link) for kind, cost in self.backward_traffic.items()}
        return (
            f"{self.tiling.mask}: {self._share()}a layer sends {mib(self.forward_traffic.rank)} "
            f"a rank forward{self._saved()}; backward the {self._way(self.chosen)} puts "
            f"{backward[self.chosen]} on the busiest link, the {self._way(other)} would "
            f"{backward[other]}; FLOPs max/mean {imbalance(self.tiling):.3f}"
        )

    def _way(self, kind: Kind) -> str:
        return f"{kind} {'ring' if isinstance(self.backward[kind], Ring) else 'direct exchange'}"

    def _share(self) -> str:
        """How much of the work a window, documents or blocks leave."""
        mask, tokens = self.tiling.mask, self.tiling.tokens
        if not mask.is_sparse:
            return ""
        everything = tokens * (tokens + 1) // 2 if mask.is_causal else tokens * tokens
        pairs = sum(tile.pairs for tile in self.tiling.all())
        tiles = sum(1 for _ in self.tiling.all())
        return f"{pairs / everything:.1%} of the pairs without it in {tiles} tiles, "

    def _saved(self) -> str:
        if not self.tiling.mask.is_sparse:
            return ""
        way = "by a ring" if isinstance(self.forward, Ring) else "straight"
        return f" {way} instead of {mib(self.unmasked)}"


def choose(
    config: BurstConfig,
    tiling: Tiling,
    grid: Grid,
    sizes: Mapping[Kind, int],
    nodes: Sequence[Hashable],
    along_grid: bool = False,
) -> Choice:
    """Choose by the bytes on the busiest link.

    Args:
        config: what is asked for.
        tiling: who computes what.
        grid: of the ranks.
        sizes: the bytes of a whole item of each kind.
        nodes: each rank's node.
        along_grid: whether messages pass within rows and columns of the grid alone, as adopted
            process groups do; then nothing goes straight from any rank to any other.
    """

    def cost(way: Way, *, backward: bool) -> Traffic:
        hops = [*way.reads(), *(way.gradients() if backward else ())]
        return traffic(hops, sizes, nodes, tiling.local_tokens)

    ways = _ways(config, tiling, grid, nodes, along_grid)
    forward = {way: cost(way, backward=False) for way in ways[Kind.KV]}
    backward = {kind: {w: cost(w, backward=True) for w in ways[kind]} for kind in ways}
    best = {kind: _cheaper(costs) for kind, costs in backward.items()}
    costs = {kind: backward[kind][way] for kind, way in best.items()}
    way = _cheaper(forward)
    return Choice(
        tiling,
        way,
        forward[way],
        best,
        costs,
        _backward_kind(config, costs),
        (grid.ranks - 1) * sizes[Kind.KV],
    )


def make_layout(config: BurstConfig, tokens: int, ranks: int) -> Layout:
    """Return which tokens of a sequence each of `ranks` ranks holds.

    Raises:
        ValueError: the sequence does not divide over the ranks.
    """
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


def _ways(
    config: BurstConfig,
    tiling: Tiling,
    grid: Grid,
    nodes: Sequence[Hashable],
    along_grid: bool,
) -> dict[Kind, list[Way]]:
    """Return, for what may travel, the plans that may be made: first the one that is usual."""
    gather, back = config.algorithm is Algorithm.ALLGATHER, _gradient_return(config, grid, nodes)
    kinds = (Kind.KV, Kind.QUERY)
    ways: dict[Kind, list[Way]] = {kind: [Ring(tiling, grid, kind, back, gather)] for kind in kinds}
    if config.algorithm is Algorithm.BURST and tiling.mask.is_sparse and not along_grid:
        for kind in kinds:
            ways[kind].append(Direct(tiling, grid, kind))
    return ways


def _gradient_return(config: BurstConfig, grid: Grid, nodes: Sequence[Hashable]) -> GradientReturn:
    if config.gradient_return is not GradientReturn.AUTO:
        return config.gradient_return
    leaves_the_node = grid.nodes == 1 and len(set(nodes)) > 1
    chained = config.algorithm is not Algorithm.BURST or leaves_the_node
    return GradientReturn.CHAIN if chained else GradientReturn.HOME


def _backward_kind(config: BurstConfig, costs: Mapping[Kind, Traffic]) -> Kind:
    """Return what is to travel: as configured, or what puts fewer bytes on the busiest link."""
    if config.algorithm is not Algorithm.BURST:
        return Kind.KV
    if config.backward is Backward.AUTO:
        return min(costs, key=lambda kind: costs[kind].busiest_link)
    return Kind(config.backward.value)


def _cheaper(costs: Mapping[Way, Traffic]) -> Way:
    """Return the usual way, or another that puts at most half as much on the busiest link.

    Less would not pay: messages of a direct exchange pass between any two ranks, and a rank holds
    all that it receives at once.
    """
    usual, *others = costs
    limit = costs[usual].busiest_link / 2
    return next((way for way in others if costs[way].busiest_link <= limit), usual)


def mib(count: int) -> str:
    """Write a number of bytes down for the log."""
    return f"{count / 2**20:.2f} MiB"
