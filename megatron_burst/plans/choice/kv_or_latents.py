"""Whether it pays to send the latents of multi-latent attention: fewer bytes for more FLOPs."""

from dataclasses import replace

from megatron_burst.config import Algorithm, BurstConfig, Mla
from megatron_burst.plans.choice.cost import LatentShape, Shape
from megatron_burst.plans.choice.planning import Choice, choose, mib
from megatron_burst.plans.choice.timing import Links
from megatron_burst.plans.schedules.tiles import Tiling
from megatron_burst.plans.schedules.topology import Grid


def choose_kv(
    config: BurstConfig,
    tiling: Tiling,
    grid: Grid,
    links: Links,
    latents: LatentShape | None,
    memory_limit: float,
) -> tuple[Choice, Shape, str]:
    """Choose between K and V of all heads, as `links` say, and the latents, if any, they are of.

    Returns:
        The schedules, as `choose` does, the shape that travels, and for the log what the other
        would have sent.
    """

    def choose_for(shape: Shape) -> Choice:
        return choose(config, tiling, grid, shape, links.nodes, memory_limit, links)

    heads = links.shape
    with_heads = choose_for(heads)
    if latents is None or config.algorithm is not Algorithm.BURST or config.mla is Mla.HEADS:
        return with_heads, heads, ""
    shape = replace(heads, latents=latents, sends_raw=False)  # a product makes their gradients
    with_latents = choose_for(shape)
    large, small = (mib(choice.forward[0].cost.rank) for choice in (with_heads, with_latents))
    if config.mla is Mla.LATENT or latents_pay(with_heads, with_latents, links, shape):
        said = f"; latents travel: K and V would send {large} forward"
        return with_latents, shape, said
    said = f"; K and V travel: latents would send {small} forward, but take longer to expand"
    return with_heads, heads, said


def latents_pay(heads: Choice, latents: Choice, links: Links, shape: Shape) -> bool:
    """Say whether a layer is faster by the clock where latents travel; `shape` has them."""
    ways = (latents, links._replace(shape=shape)), (heads, links)
    faster, slower = (sum(each.seconds for each in choice.times(of)) for choice, of in ways)
    return faster < slower
