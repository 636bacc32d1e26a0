"""Whether it pays to send the latents of multi-latent attention: fewer bytes for more FLOPs."""

from collections.abc import Callable
from dataclasses import replace

from megatron_burst.config import Algorithm, BurstConfig, Mla
from megatron_burst.plans.choice.cost import LatentShape, Shape, forward_flops
from megatron_burst.plans.choice.planning import Choice, mib

_BACKWARD = 2.5  # FLOPs of attention's backward, in those of its forward


def choose_keys(
    choose: Callable[[Shape], Choice],
    heads: Shape,
    latents: LatentShape | None,
    config: BurstConfig,
) -> tuple[Choice, Shape, str]:
    """Choose between K and V of all heads and the latents, if any, that they are made of.

    Returns:
        The schedules, the shape that travels, and for the log what the other would have sent.
    """
    with_heads = choose(heads)
    if latents is None or config.algorithm is not Algorithm.BURST or config.mla is Mla.HEADS:
        return with_heads, heads, ""
    shape = replace(heads, latents=latents, sends_raw=False)  # a product makes their gradients
    with_latents = choose(shape)
    large, small = (mib(choice.forward[0].cost.rank) for choice in (with_heads, with_latents))
    if config.mla is Mla.LATENT or latents_pay(with_heads, with_latents, shape):
        said = f"; latents travel: K and V would send {large} forward"
        return with_latents, shape, said
    said = f"; K and V travel: latents would send {small} forward, but take longer to expand"
    return with_heads, heads, said


def latents_pay(heads: Choice, latents: Choice, shape: Shape) -> bool:
    """Say whether a layer is faster where latents travel; `shape` has them."""
    return bool(_time(latents, shape, _up_projection(latents, shape)) < _time(heads, shape, 0.0))


def _time(choice: Choice, shape: Shape, up_projection: float) -> float:
    """Return a layer's time as that of so many FLOPs; messages hide under them.

    A backward makes K and V again, and of their gradients those of the latents and of the weight.
    """
    attention = forward_flops(choice.tiling, shape)
    forward, backward = choice.forward[0].cost, choice.backward[0].cost
    return max(attention + up_projection, forward.flops) + max(
        _BACKWARD * attention + 3 * up_projection, backward.flops
    )


def _up_projection(choice: Choice, shape: Shape) -> float:
    """Return the FLOPs of the K and V of all that a rank meets, in a ring as much as it sends.

    A lower bound in a mesh, where a block goes around once a visitor and is expanded every time.
    """
    assert shape.latents
    sent = choice.forward[0].cost.rank / (shape.latents.size * shape.element_bytes)
    rows = min(sent, (choice.tiling.ranks - 1) * shape.tokens)
    return 2.0 * rows * shape.latents.weight
