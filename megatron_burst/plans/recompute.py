"""Which rows of attention a checkpointed call saves in its first pass, and which it recomputes."""

from megatron_burst.plans.layout import Layout


def boundary(layout: Layout, fraction: float) -> int:
    """Return the position before which rows are recomputed: the border of chunks nearest to ρ·S.

    A rank alone, or one that holds every P-th token, has no chunks, and any position will do.
    """
    wanted = fraction * layout.tokens
    if layout.ranks == 1 or any(r.step > 1 for shard in layout.shards for r in shard):
        return round(wanted)
    borders = {layout.tokens, *(r.start for shard in layout.shards for r in shard)}
    return min(sorted(borders), key=lambda border: abs(border - wanted))


def first_saved_row(layout: Layout, rank: int, stop: int) -> int:
    """Return how many rows of a rank have positions before `stop`; they are its first.

    Raises:
        ValueError: the rank's rows are not in the order of the sequence.
    """
    before = [len(range(r.start, min(r.stop, stop), r.step)) for r in layout.shards[rank]]
    row = sum(before)
    held = [len(r) for r in layout.shards[rank]]
    complete = [b == h for b, h in zip(before, held, strict=True)]
    if any(b and not all(complete[:i]) for i, b in enumerate(before)):
        raise ValueError(f"the rows of rank {rank} are not in the order of the sequence")
    return row
