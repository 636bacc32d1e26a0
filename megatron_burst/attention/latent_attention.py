"""The public function of multi-latent attention."""

from torch import Tensor

from megatron_burst.attention.autograd import ring_attention
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.inputs import check_alike, check_context
from megatron_burst.attention.kv import Latents, expand
from megatron_burst.kernels.dtypes import as_autocast
from megatron_burst.plans.visibility.mask import Mask


def latent_ring_attention(
    q: Tensor,
    latent: Tensor,
    rotary_key: Tensor,
    weight: Tensor,
    context: BurstContext,
    *,
    mask: Mask,
    softmax_scale: float | None = None,
) -> Tensor:
    """Multi-latent attention of the whole sequence, each rank holding the tokens of its shard.

    Equals, on every rank of the context's group, with dv of the dims of a head from `weight`,

        q, latent, rotary_key = [context.unshard(x, dim=1) for x in (q, latent, rotary_key)]
        content, v = (latent @ weight.T).unflatten(-1, (heads, -1)).split([dk - dr, dv], dim=-1)
        k = cat([content, rotary_key[:, :, None].expand(-1, -1, heads, -1)], dim=-1)
        out = context.shard(softmax(scale · q kᵀ + mask) v, dim=1)

    `BurstConfig.mla` says what travels: k and v of all heads, or latent and rotary key, rank + dr
    numbers a token, of which every rank makes k and v of its heads itself. A rank then holds in
    turn, besides its own, those of one other.

    Args:
        q: [batch, local tokens, heads, dk], the last dr of a head with rotary embeddings.
        latent: [batch, local tokens, rank], after its norm.
        rotary_key: [batch, local tokens, dr], one for all heads.
        weight: [rows of all heads, rank]: of each dk - dr + dv, first those of k. Its gradient on a
            rank is a part; like that of any parameter it is summed over the group.
        context: as for `ring_attention`, as are `mask` and `softmax_scale`.

    Returns:
        out, [batch, local tokens, heads, dv] in q's dtype.

    Raises:
        ValueError, TypeError, CommunicationError: as `ring_attention` does.
    """
    check_context(context)
    with context.agreed.told("latent attention"):
        q, latent, rotary_key, weight = as_autocast(q, latent, rotary_key, weight)
        check_alike(q=q, latent=latent, rotary_key=rotary_key, weight=weight)
        (rows, rank), heads, dr = weight.shape, max(q.shape[2], 1), rotary_key.shape[2]
        value_dim = rows // heads - q.shape[3] + dr
        fits = q.shape[:2] == latent.shape[:2] == rotary_key.shape[:2] and 0 < dr <= q.shape[3]
        if not fits or value_dim <= 0 or rows % heads or rank != latent.shape[2]:
            raise ValueError(
                f"a weight {tuple(weight.shape)} does not make k and v for q {tuple(q.shape)} of a "
                f"latent {tuple(latent.shape)} and a rotary key {tuple(rotary_key.shape)}"
            )
    k, v = expand(latent[:, :, None], rotary_key[:, :, None], weight, heads, value_dim)
    made_of = Latents(latent, weight)
    return ring_attention(q, k, v, context, mask=mask, softmax_scale=softmax_scale, latents=made_of)
