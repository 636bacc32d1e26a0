"""What the public functions of attention refuse before any work starts."""

import math

from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.kernels.inputs import check_local
from megatron_burst.plans.visibility.layout import Layout
from megatron_burst.plans.visibility.mask import Mask

_HEADS = "[batch, tokens, heads, head size]"
_SHAPES = {
    "latent": "[batch, tokens, rank]",
    "rotary_key": "[batch, tokens, rotary size]",
    "weight": "[rows, rank]",
}


def check_context(context: BurstContext) -> None:
    """Raise a TypeError for what is no context, with which no other rank could be told."""
    if not isinstance(context, BurstContext):
        made = "as BurstContext.create(BurstConfig()) is"
        raise TypeError(f"context must be a BurstContext, {made}; got {context!r}")


def check_mask(mask: Mask, layout: Layout | None, block_mask: str | None) -> None:
    """Raise a TypeError for no mask or layout; refuse a mask without the blocks of the settings."""
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, as Mask.causal() is; got {mask!r}")
    if not isinstance(layout, Layout | None):
        raise TypeError(f"layout must be a Layout, as context.layout(tokens) is; got {layout!r}")
    if block_mask is not None and mask.block_table is None:
        raise ValueError(
            f"BurstConfig(block_mask={block_mask!r}) is read by Megatron's layers alone: give its "
            "table with the mask, as Mask.causal(block_table=table)"
        )


def check_alike(**tensors: Tensor) -> None:
    """Refuse another number of dimensions, and another dtype or device than that of q."""
    check_local(**tensors)
    q = tensors["q"]
    for name, x in tensors.items():
        shape = _SHAPES.get(name, _HEADS)
        if x.ndim != shape.count(",") + 1:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{', '.join(tensors)} must share dtype and device; q has {q.dtype} on "
                f"{q.device}, {name} has {x.dtype} on {x.device}"
            )


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse shapes that do not fit each other, or are empty; a batch may be."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"q, k and v must agree in batch and tokens, k and v in heads; {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have one head size; {shapes}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of kv heads; {shapes}")
    if 0 in (*q.shape[1:], v.shape[3]):
        raise ValueError(f"tokens, heads and head sizes must be at least 1; {shapes}")


def check_scores(q: Tensor, scale: float, soft_cap: float | None, sink: Tensor | None) -> None:
    """Refuse a scale that is no number, a soft cap that is no bound, a sink that does not fit q."""
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite, got {scale}; None is 1/√(head size)")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"a soft cap is positive and finite, got {soft_cap}; None is no cap")
    if sink is None:
        return
    check_local(sink=sink)
    if sink.shape != q.shape[2:3]:
        raise ValueError(
            f"a sink has one score a query head, [{q.shape[2]}]; got {tuple(sink.shape)}"
        )
    if not sink.is_floating_point() or sink.device != q.device:
        raise ValueError(
            f"a sink is a floating-point tensor where q is, on {q.device}; got {sink.dtype} on "
            f"{sink.device}"
        )
