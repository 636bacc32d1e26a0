"""The latents of Megatron's multi-latent attention, so that the ring sends them and not K and V.

Megatron's layer makes K and V of its own tokens as always. Its up-projection's input is remembered
on the way; core attention takes it, and the rotary key out of K, which holds it in every head.
"""

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention, MLASelfAttention
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from megatron_burst.attention.kv import Latents
from megatron_burst.config import Mla
from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention
from megatron_burst.plugin.limits import LATENT_LIMITS
from megatron_burst.plugin.local_layers import LocalMLASelfAttention
from megatron_burst.plugin.refusals import broken_limits, refuse_all

logger = logging.getLogger(__name__)

_KNOWN = (ColumnParallelLinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear)


class LatentSelfAttention(MLASelfAttention):
    """Megatron's layer, whose latents our core attention knows; the same parameters."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        attach(self)


class LatentFusedSelfAttention(LatentSelfAttention, FusedMLASelfAttention):
    """The same for --mla-down-proj-fusion."""


class LatentLocalSelfAttention(LatentSelfAttention, LocalMLASelfAttention):
    """The same where TransformerEngine is not installed."""


WITH_LATENTS: Mapping[Any, type] = {
    MLASelfAttention: LatentSelfAttention,
    LocalMLASelfAttention: LatentLocalSelfAttention,
    FusedMLASelfAttention: LatentFusedSelfAttention,
}
"""What stands in a spec in the place of Megatron's own classes."""


def attach_to_megatrons(models: list[Any]) -> list[Any]:
    """Attach to layers that are Megatron's own, and return all: a hook, which may come again.

    For --mla-down-proj-fusion Megatron's hybrid stack writes its class over ours in the spec.
    """
    for module in (module for model in models for module in model.modules()):
        if type(module) in WITH_LATENTS and getattr(module.core_attention, "latents", 0) is None:
            attach(module)
    return models


def attach(attention: Any) -> None:
    """Let the core attention of a layer take its latents, if it is ours and may send them.

    Raises:
        ValueError: --burst-mla latent, and this layer's cannot be sent.
    """
    core = attention.core_attention
    if not isinstance(core, BurstCoreAttention) or not core.may_send_latents:
        return
    mla = core.context.config.mla
    reasons = [] if mla is Mla.HEADS else reasons_against(attention)
    if mla is Mla.LATENT:
        refuse_all(f"layer {attention.layer_number} cannot run --burst-mla {mla}", reasons)
    if reasons and core.context.should_log(text := "; ".join(reasons)):
        logger.info("burst attention: K and V of all heads travel, not latents: %s", text)
    if not reasons and mla is not Mla.HEADS:
        core.latents = LastLatents(attention).take


def reasons_against(attention: Any) -> list[str]:
    """Return why the latents of a layer cannot be sent; empty if they can."""
    linear, reasons = attention.linear_kv_up_proj, broken_limits(LATENT_LIMITS, attention.config)
    if type(linear) not in _KNOWN:
        reasons.append(f"its up-projection is a {type(linear).__name__}, which is not known")
    if getattr(linear, "gtp_remat_size", 1) > 1:
        reasons.append(f"the up-projection is spread over {linear.gtp_remat_size} GTP ranks")
    if attention.checkpoint_core_attention:
        reasons.append(
            "the second pass of core attention alone has no latents: leave core_attn out of "
            "--recompute-modules (mla_up_proj is possible)"
        )
    return reasons


class LastLatents:
    """What one layer's up-projection was given last.

    Weakly: what recomputes an up-projection alone never asks.
    """

    def __init__(self, attention: Any) -> None:
        self._linear, self._config = attention.linear_kv_up_proj, attention.config
        self._tensor_parallel = attention.pg_collection.tp
        self._given: Any = None
        self._pending: Tensor | None = None  # what received latents add to the weight's gradient
        self._hooked: Tensor | None = None  # the weight that says when
        self._linear.register_forward_pre_hook(self._remember)

    def _remember(self, _: Any, given: tuple[Tensor, ...]) -> None:
        self._given = weakref.ref(given[0])

    def take(self, batch: int) -> Latents:
        """Return the latents of all tokens of this rank, in as many samples."""
        latent, self._given = self._given(), None
        # Before it is gathered: each tensor-parallel rank normalises what it holds.
        latent, group = _normalised(latent, self._linear), self._tensor_parallel
        if group.size() > 1 and self._config.sequence_parallel:
            latent = gather_from_sequence_parallel_region(latent, group=group)
        elif group.size() > 1:
            latent = copy_to_tensor_model_parallel_region(latent, group=group)
        latent = latent.reshape(-1, batch, latent.shape[-1]).transpose(0, 1)  # sbr -> bsr
        weight = self._linear.weight
        if not weight.requires_grad or getattr(weight, "main_grad", None) is None:
            return Latents(latent, weight)
        if self._hooked is not weight:
            self._hooked = weight
            weight.register_hook(self._add_pending)
        return Latents(latent, weight, self._keep)

    def _keep(self, gradient: Tensor) -> None:
        self._pending = gradient if self._pending is None else self._pending + gradient

    def _add_pending(self, _: Tensor) -> None:
        """Behind the up-projection's backward, which may write over `main_grad`, but before DDP."""
        if self._pending is not None:
            self._linear.weight.main_grad.add_(self._pending)
            self._pending = None


def _normalised(x: Tensor, linear: Any) -> Tensor:
    """Apply the norm that TransformerEngine fuses into the up-projection, if it does."""
    if not hasattr(linear, "layer_norm_weight"):
        return x
    wide = accumulation_dtype(x.dtype)
    gamma, size = linear.layer_norm_weight.to(wide), x.shape[-1:]
    if linear.zero_centered_gamma:
        gamma = gamma + 1
    if linear.normalization == "RMSNorm":
        return rms_norm(x.to(wide), size, gamma, linear.eps).to(x.dtype)
    bias: Tensor = linear.layer_norm_bias.to(wide)
    return layer_norm(x.to(wide), size, gamma, bias, linear.eps).to(x.dtype)
