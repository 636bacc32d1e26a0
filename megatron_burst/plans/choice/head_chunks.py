"""Into how many chunks attention cuts a rank's heads, to hold one chunk's buffers at a time."""

from megatron_burst.config import Algorithm, BurstConfig, Mla

_CHUNKS = 4, 2
_ROWS = 2**18
"""Rows of all heads that a chunk has at least. Of half of them, the queries of a zigzag tile, a
kernel makes 1024 blocks of 128 rows: eight for every multiprocessor of an H100, so that the last
ones, in which some of these have nothing to do, are few."""


def choose_head_chunks(
    config: BurstConfig,
    tokens: int,
    query_heads: int,
    kv_heads: int,
    *,
    is_worth_it: bool = True,
    has_latents: bool = False,
) -> int:
    """Return into how many chunks the heads are cut: as asked for, or as fill a GPU.

    Args:
        tokens: batch x tokens of a rank.
        query_heads: of a rank, after tensor and head parallelism, as `kv_heads`.
        is_worth_it: whether much lives: on a GPU, with blocks to receive, without documents.
        has_latents: whether K and V are made of them; if they may travel, they have no heads.

    Raises:
        ValueError: the number that is asked for does not divide the kv heads.
    """
    if (chunks := config.head_chunks) is not None:
        check_head_chunks(chunks, kv_heads)
        return chunks
    latents_may_travel = has_latents and config.mla is not Mla.HEADS
    if config.algorithm is not Algorithm.BURST or latents_may_travel or not is_worth_it:
        return 1
    fills = (n for n in _CHUNKS if kv_heads % n == 0 and tokens * query_heads >= n * _ROWS)
    return next(fills, 1)


def check_head_chunks(chunks: int, kv_heads: int) -> None:
    """Raise a ValueError if the kv heads of a rank cannot be cut into so many chunks."""
    if kv_heads % chunks:
        raise ValueError(
            f"--burst-head-chunks {chunks} does not divide the {kv_heads} kv heads of a rank, "
            "after tensor and head parallelism"
        )
