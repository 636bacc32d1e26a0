"""Bytes and pairs of plans, counted, against what they are on paper. (fast tier)"""

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from megatron_burst.plans.choice.cost import Shape, Traffic, traffic
from megatron_burst.plans.schedules.plan import Hop, Kind
from megatron_burst.plans.schedules.rings import Ring
from megatron_burst.plans.schedules.schedule import Loads, Messages
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid, flat_grid
from megatron_burst.plans.visibility.layout import Layout, contiguous, zigzag
from megatron_burst.plans.visibility.mask import Mask
from tests.plans.simulator import bytes_sent, plans_of, simulate, tiles_of

CHAIN, HOME = True, False
SIZES = {Kind.KV: 1000, Kind.QUERY: 700, Kind.D_KV: 30, Kind.D_QUERY: 7}
SIZES |= {Kind.PARTIAL_D_KV: 11, Kind.PARTIAL_D_QUERY: 5}


def test_the_bytes_of_a_hop() -> None:
    n, hq, hkv, dk, dv, e, g = 10, 6, 2, 5, 3, 2, 4
    shape = Shape(n, hq, hkv, dk, dv, e, g)
    size = shape.item_bytes()
    assert size[Kind.KV] + size[Kind.D_KV] == n * hkv * (dk + dv) * (e + g)
    assert size[Kind.QUERY] + size[Kind.D_QUERY] == n * hq * (e * (dk + dv) + g * dk + 8)
    assert Shape(n, hq, hkv, dk, dv, 8, 8, row_bytes=8).item_bytes()[Kind.QUERY] == n * hq * (
        8 * (dk + dv) + 16
    )
    for raw, width in ((True, e), (False, g)):
        sizes = replace(shape, sends_raw=raw).item_bytes()
        partials = n * hkv * (dk + dv) * width, n * hq * dk * width
        assert (sizes[Kind.PARTIAL_D_KV], sizes[Kind.PARTIAL_D_QUERY]) == partials


class Sent:
    """Items of KV from rank to rank."""

    def __init__(self, *ends: tuple[int, int]) -> None:
        self.sources, self.targets = np.array(ends, np.int64).reshape(-1, 2).T

    def hops(self, rank: int | None = None) -> list[Hop]:
        raise NotImplementedError

    def loads(self, sizes: Mapping[Kind, int], local_tokens: int, *, summed: bool = False) -> Loads:
        step = np.zeros(1, np.int64)
        one = [x[None] for x in (self.sources, self.targets)]
        return Loads(*one, np.full_like(one[0], sizes[Kind.KV]), step, step)


def test_traffic_is_that_of_the_busiest_rank_and_nic() -> None:
    nodes = ["a", "a", "b", "b", "c"]
    sent = [Sent((0, 1), (0, 1), (0, 1), (1, 2)), Sent((1, 0), (2, 0), (2, 4), (3, 0), (3, 2))]
    found = traffic(sent, SIZES, nodes, 1)
    # Rank 0 sends three; rank 2 sends two out of its node.
    assert found == Traffic(rank=3000, nic=2000)
    assert found.bottleneck == 2000
    assert traffic(sent, SIZES, ["a"] * 5, 1) == Traffic(rank=3000, nic=0)
    assert traffic(sent, SIZES, ["a"] * 5, 1).bottleneck == 3000
    assert traffic([Sent()], SIZES, nodes, 1) == Traffic(0, 0)


@pytest.mark.parametrize(("nodes", "length"), [*itertools.product([1, 2, 3], [1, 2, 4])])
@pytest.mark.parametrize("returns", [CHAIN, HOME])
@pytest.mark.parametrize("kind", [Kind.KV, Kind.QUERY])
def test_traffic_of_flat_and_double_rings(
    nodes: int, length: int, returns: bool, kind: Kind
) -> None:
    ranks = nodes * length
    placed = [rank // length for rank in range(ranks)]
    block, gradient, partial = (SIZES[k] for k in (kind, kind.gradient, kind.gradient.partial))
    tiling = Tiling(zigzag(8 * ranks, ranks), Mask.causal())
    flat = Ring(tiling, Grid((tuple(range(ranks)),)), kind, returns)
    double = Ring(tiling, Grid(tuple(itertools.batched(range(ranks), length))), kind, returns)
    away = nodes > 1

    def found(*messages: Messages) -> Traffic:
        return traffic(messages, SIZES, placed, tiling.local_tokens)

    # One rank a node sends all that leaves it; straight home, each sends its own parts.
    leaves, part = (ranks - 1, gradient) if returns is CHAIN else (ranks - length, partial)
    reads = (ranks - 1) * block
    assert found(flat.reads()) == Traffic(reads, away * reads)
    assert found(flat.gradients()) == Traffic((ranks - 1) * part, away * leaves * part)
    # All NICs work; a chain has one more hop within the node.
    more = returns is CHAIN and nodes > 1 and length > 1
    between = (nodes - 1) * (gradient if length > 1 else part)
    within = (nodes * (length - 1) + more) * part
    assert found(double.reads()) == Traffic(reads, (nodes - 1) * block)
    assert found(double.gradients()) == Traffic(within + between, between)
    for ring in (flat, double):
        sent = found(ring.reads(), ring.gradients()).rank
        assert [bytes_sent(plan, SIZES) for plan in plans_of(ring, True)] == [sent] * ranks


def test_a_node_is_sent_the_rows_that_it_needs() -> None:
    """Of rank 0 its own node needs the first half, the other node the second."""
    shards = (range(4), range(8, 12)), (range(4, 8), range(16, 20))
    others = (range(12, 16), range(20, 24)), (range(24, 32),)
    tiling = Tiling(Layout((*shards, *others)), Mask.causal(documents=(0, 8, 16, 24, 32)))
    sizes = {Kind.KV: 8, Kind.D_KV: 80, Kind.PARTIAL_D_KV: 40}
    sent = dict[bool, list[Traffic]]()
    for back in (HOME, CHAIN):
        ring = Ring(tiling, Grid(((0, 1), (2, 3))), Kind.KV, back)
        passes = [ring.messages(backward=backward) for backward in (False, True)]
        sent[back] = [traffic(some, sizes, "aabb", 8) for some in passes]
        pairs = int(tiling.needs.pairs.sum())
        for backward in (False, True):
            simulate(plans_of(ring, backward), backward=backward, pairs=pairs)
    assert [each.nic for each in sent[HOME]] == [4, 40]
    assert [each.nic for each in sent[CHAIN]] == [8, 80], "sums of all nodes"


@pytest.mark.parametrize("kind", [Kind.KV, Kind.QUERY])
def test_all_rows_of_a_tile_are_sent_to_its_node(kind: Kind) -> None:
    mask = Mask.causal(documents=(0, 7, 30, 41, 90, 96))
    for layout in (zigzag(96, 6), contiguous(96, 6)):
        ring = Ring(Tiling(layout, mask), Grid(((0, 1), (2, 3), (4, 5))), kind, HOME)
        plans = plans_of(ring, True)
        simulate(plans, backward=True, pairs=int(ring.pairs.sum()))
        for tile in (tile for plan in plans for tile in tiles_of(plan)):
            rows = tile.rows_of(kind)
            part = (tile.key_part if kind is Kind.KV else tile.query_part) or (rows,)
            assert any(p.start <= rows.start and rows.stop <= p.stop for p in part), tile


def test_zigzag_shares_the_work_of_a_causal_mask_evenly_and_contiguous_does_not() -> None:
    def uneven(layout: Layout, mask: Mask) -> float:
        return Ring(Tiling(layout, mask), flat_grid(layout.ranks)).imbalance

    for ranks in (1, 2, 5, 8, 64):
        assert 1 <= uneven(zigzag(16 * ranks, ranks), Mask.causal()) <= 1.05
    assert uneven(contiguous(128, 8), Mask.causal()) > 1.8
    assert uneven(contiguous(128, 8), Mask.full()) == 1
