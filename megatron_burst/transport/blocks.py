"""The tensors of an item, and some rows of them."""

from torch import Tensor

from megatron_burst.plans.layout import Interval

type Block = tuple[Tensor, ...]


def rows_of(block: Block, rows: Interval | None) -> Block:
    """Return these rows of every tensor, [B, S, H, D] or [B, H, S]; None is all."""
    if rows is None:
        return block
    return tuple(t[:, rows.rows] if t.ndim == 4 else t[:, :, rows.rows] for t in block)
