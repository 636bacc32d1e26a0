"""Which tokens each rank holds, by the settings."""

from megatron_burst.config import BurstConfig, LayoutName
from megatron_burst.plans.visibility.layout import (
    Layout,
    contiguous,
    segmented_zigzag,
    striped,
    zigzag,
)

_CHUNK_ROWS = 512  # at least, of each of more than two segments; four of a kernel's blocks


def make_layout(config: BurstConfig, tokens: int, ranks: int) -> Layout:
    """Return which tokens each rank holds; ValueError if they do not divide over the ranks."""
    if config.layout is LayoutName.SEGMENTED_ZIGZAG and config.cuts_for_recompute:
        chunks, fraction = 2 * ranks, config.recompute_fraction or 0.0
        early = round(fraction * tokens / chunks) * chunks
        return segmented_zigzag([n for n in (early, tokens - early) if n], ranks)
    if config.layout is LayoutName.SEGMENTED_ZIGZAG:
        # With 8 ranks of 8192 tokens 8 leave 1.03 of the mean's work of a sparse block mask.
        enough = (n for n in (8, 4) if tokens % (2 * n * ranks) == 0)
        count = next((n for n in enough if tokens // (2 * n * ranks) >= _CHUNK_ROWS), 2)
        parts = [tokens] if tokens % count else [tokens // count] * count
        return segmented_zigzag(parts, ranks)
    # Balanced layouts are zigzag where there are no documents by which to choose.
    makers = {LayoutName.CONTIGUOUS: contiguous, LayoutName.STRIPED: striped}
    return makers.get(config.layout, zigzag)(tokens, ranks)
