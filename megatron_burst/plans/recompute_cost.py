"""What keeping a part of attention's results costs and saves, counted from the shapes alone."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from megatron_burst.config import BurstConfig, LayoutName
from megatron_burst.plans.cost import Shape, bytes_sent
from megatron_burst.plans.layout import Layout
from megatron_burst.plans.mask import Mask
from megatron_burst.plans.planning import Choice, choose, mib
from megatron_burst.plans.recompute import first_kept_row
from megatron_burst.plans.tiles import Tiling
from megatron_burst.plans.topology import Grid

UNEVEN = 1.1  # the most that a rank may run again, of what the one with the least does


@dataclass(frozen=True, slots=True)
class Prediction:
    """What every rank of a ring keeps of one attention call and runs again; see `predict`."""

    layout: LayoutName
    fraction: float
    """What ρ has become, rounded to whole chunks."""
    kept: Sequence[int]
    """Bytes."""
    pairs_again: Sequence[int]
    """(query, key) pairs of the second pass, a head."""
    pairs: Sequence[int]
    """And of the first."""
    sent_again: Sequence[int]
    """Bytes of the second pass."""
    sent: Sequence[int]

    @property
    def flops_share(self) -> float:
        """The share of a forward's FLOPs that runs again, on the slowest ranks of both passes."""
        return max(self.pairs_again) / max(self.pairs)

    @property
    def bytes_share(self) -> float:
        """The share of a forward's ring bytes that is sent again, likewise; 0 without a ring."""
        return max(self.sent_again) / max(self.sent) if any(self.sent) else 0.0

    @property
    def unevenness(self) -> float:
        """Max / min over the ranks of what runs again; infinite where a rank has nothing to do."""
        most, least = max(self.pairs_again), min(self.pairs_again)
        if most == least:
            return 1.0
        return most / least if least else float("inf")

    def __str__(self) -> str:
        """Say it for the log, with what to change where the ranks repeat unequally."""
        ring = f" and {self.bytes_share:.1%} of its ring bytes" if any(self.sent) else ""
        text = (
            f"attention runs again for the first {self.fraction:.4g} of the sequence, on the "
            f"slowest rank {self.flops_share:.1%} of a forward's FLOPs{ring}; a layer keeps "
            f"{mib(max(self.kept))} of a micro-batch"
        )
        if self.unevenness <= UNEVEN:
            return text
        text += f"; what runs again is uneven over the ranks, max/min {self.unevenness:.2f}"
        if self.layout is LayoutName.ZIGZAG:
            text += f": --burst-layout {LayoutName.SEGMENTED_ZIGZAG} spreads it evenly"
        return text


def predict(
    config: BurstConfig,
    layout: Layout,
    mask: Mask,
    grid: Grid,
    shape: Shape,
    stop: int,
    nodes: Sequence[Hashable],
    along_grid: bool = False,
) -> Prediction:
    """Count one attention call in two passes, the second for the positions before `stop`.

    Args:
        config: as that of the call.
        layout: which tokens the ranks of one ring hold.
        mask: of the call.
        grid: of the ranks of one ring.
        shape: of a rank's tensors in the ring.
        stop: see `recompute.boundary`.
        nodes: each rank's node.
        along_grid: see `planning.choose`.
    """
    ranks = range(layout.ranks)

    def chosen(mask: Mask) -> Choice:
        return choose(config, Tiling(layout, mask), grid, shape.item_bytes(), nodes, along_grid)

    def pairs(choice: Choice) -> list[int]:
        return [sum(t.pairs for k in ranks for t in choice.tiling(q, k)) for q in ranks]

    def sent(choice: Choice) -> list[int]:
        plans = [choice.forward.forward(rank) for rank in ranks]
        return [bytes_sent(plan, shape.item_bytes(), layout.local_tokens) for plan in plans]

    whole = chosen(mask)
    again = whole if stop == layout.tokens else chosen(replace(mask, query_stop=stop))
    samples = shape.tokens // layout.local_tokens
    row = (
        samples * shape.query_heads * (shape.value_head_dim * shape.element_bytes + shape.row_bytes)
    )
    kept = [row * (layout.local_tokens - first_kept_row(layout, rank, stop)) for rank in ranks]
    return Prediction(
        config.layout,
        stop / layout.tokens,
        kept,
        pairs(again),
        pairs(whole),
        sent(again),
        sent(whole),
    )


def passes_in_flight(stages: int, chunks: int, micro_batches: int) -> int:
    """Return how many forward passes of a model chunk the first pipeline stage holds at most.

    Args:
        stages: of the pipeline.
        chunks: of a stage; more than one is Megatron's interleaved schedule.
        micro_batches: of a step.
    """
    most = stages if chunks == 1 else 2 * (stages - 1) + (chunks - 1) * stages + 1
    return min(most, chunks * micro_batches)
