"""Head parallelism: which ranks share out their heads, and what the rings over the groups hold.

Of P ranks each U form a group. An all-to-all in a group gives each member all tokens of the group
and 1/U of the heads; the members of one index in all groups then form a ring of P/U. U = 1 is a
ring alone, U = P an all-to-all alone.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.plans.choice.cost import Shape
from megatron_burst.plans.schedules.topology import by_node
from megatron_burst.plans.visibility.layout import Layout


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Groups of ranks, all of one size, in the order of their first members.

    The number of a rank's group is its rank in its ring, its index in the group the number of its
    share of the heads.
    """

    groups: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """U, the number of ranks of a group."""
        return len(self.groups[0])

    def coordinates(self, rank: int) -> tuple[int, int]:
        """Return the (group, index) of a rank."""
        return next((g, group.index(rank)) for g, group in enumerate(self.groups) if rank in group)

    def ring(self, index: int) -> tuple[int, ...]:
        """Return the ranks that hold share `index` of the heads, one a group."""
        return tuple(group[index] for group in self.groups)

    def ring_layout(self, layout: Layout) -> Layout:
        """Return which tokens each rank of a ring holds: those of its group, in order.

        A rank that is a group of its own has them in the order of `layout`; of neighbouring ranks
        under zigzag this is zigzag over P/U.
        """
        if self.size == 1 and layout.documents:  # there are too many to look for what to join
            return layout
        return Layout(tuple(_merged(_in_order(layout, group)) for group in self.groups))

    def member_layout(self, layout: Layout, group: int) -> Layout:
        """Return which rows of the group's tokens, counted as its ring does, each member holds."""
        members = self.groups[group]
        if len(members) == layout.ranks:
            return Layout(tuple(layout.shards[rank] for rank in members))
        whole = Layout((tuple(_in_order(layout, members)),))
        rows = dict(zip(whole.shards[0], whole.local_rows(0), strict=True))
        held = (layout.shards[rank] for rank in members)
        return Layout(tuple(tuple(range(*rows[positions]) for positions in of) for of in held))


def head_groups(nodes: Sequence[Hashable], size: int) -> HeadGroups:
    """Return groups of `size` ranks that follow each other, of a node or of several whole ones.

    `nodes` are each rank's.
    """
    node_ranks = by_node(nodes)
    ranks, on_a_node = len(nodes), len(node_ranks[0])
    if ranks % size == 0 == size % on_a_node and all(len(row) == on_a_node for row in node_ranks):
        node_ranks = (tuple(rank for row in node_ranks for rank in row),)
    if any(len(row) % size for row in node_ranks):
        held = ", ".join(str(len(row)) for row in node_ranks)
        raise ValueError(
            f"--burst-head-parallel-size {size} needs {size} ranks of a node for every all-to-all, "
            f"or of several whole ones, but of the {ranks} context-parallel ranks the nodes hold "
            f"{held}: change --burst-head-parallel-size or --context-parallel-size"
        )
    groups = (row[i : i + size] for row in node_ranks for i in range(0, len(row), size))
    return HeadGroups(tuple(sorted(groups)))


def kv_head_copies(query_heads: int, kv_heads: int, size: int) -> int:
    """Return how often each kv head of a rank is needed to give every rank of a group one."""
    if query_heads % size == 0:
        if kv_heads % size == 0:
            return 1
        if size % kv_heads == 0:
            return size // kv_heads
    raise ValueError(
        f"{query_heads} query and {kv_heads} kv heads of a rank, after tensor parallelism, cannot "
        f"be shared out evenly over {size} ranks: the query heads must divide by {size}, and the "
        f"kv heads by {size} or {size} by them; change --burst-head-parallel-size (under "
        "--context-parallel-algo ulysses: --context-parallel-size, or take burst), "
        "--num-attention-heads, --num-query-groups or --tensor-model-parallel-size"
    )


def exchanged(shape: Shape, size: int) -> Shape:
    """Return what a rank's tensors are after the all-to-all of `size` ranks."""
    copies = kv_head_copies(shape.query_heads, shape.kv_heads, size)
    return replace(
        shape,
        tokens=shape.tokens * size,
        query_heads=shape.query_heads // size,
        kv_heads=shape.kv_heads * copies // size,
    )


def _in_order(layout: Layout, ranks: Sequence[int]) -> Sequence[range]:
    if len(ranks) == 1:  # whose rows are as they are
        return layout.shards[ranks[0]]
    if len(ranks) == layout.ranks:  # whatever the layout, together they hold the whole sequence
        return [range(layout.tokens)]
    ranges = (positions for rank in ranks for positions in layout.shards[rank])
    return sorted(ranges, key=lambda positions: positions.start)


def _merged(ranges: Iterable[range]) -> tuple[range, ...]:
    """Join ranges without gaps that follow each other: fewer and larger tiles."""
    merged: list[range] = []
    for positions in ranges:
        if merged and positions.step == 1 and positions.start == merged[-1].stop:
            merged[-1] = range(merged[-1].start, positions.stop)
        else:
            merged.append(positions)
    return tuple(merged)
