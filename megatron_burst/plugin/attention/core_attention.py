"""Our attention in the core-attention slot of Megatron's layer spec."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_burst.attention.autograd import ring_attention
from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.kv import Latents
from megatron_burst.config import Mla
from megatron_burst.plans.visibility.mask import Mask
from megatron_burst.plugin.attention.documents import PackedDocuments
from megatron_burst.plugin.attention.largest_scores import largest_scores
from megatron_burst.plugin.attention.nan_check import with_nan_check
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.attention.sink import ModuleWithSink
from megatron_burst.plugin.attention.verify import LayerCheck
from megatron_burst.plugin.refusals import refusals, refuse_all
from megatron_burst.plugin.training_config import Check

_IS_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class BurstCoreAttention(ModuleWithSink):
    """`ring_attention` under the contract of Megatron's `CoreAttentionInterface`.

    Takes the constructor arguments of Megatron's own classes, and whether TransformerEngine's stood
    in the spec (`saves_extra_state`); the head sizes, which MLA gives, follow from the tensors.

    Raises:
        ValueError: the transformer config asks for what our attention cannot do.
    """

    def __init__(
        self,
        *,
        shared: SharedState,
        saves_extra_state: bool = False,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config, pg_collection, saves_extra_state)
        reasons = refusals(config)
        if attention_dropout:
            reasons.append(f"attention_dropout = {attention_dropout}: only 0 is possible")
        if attention_type != "self":
            reasons.append(f"attention_type = {attention_type}: only self-attention is supported")
        self._clips = getattr(config, "qk_clip", False)  # 0.13 has none
        if self._clips and shared.verification is not None:
            reasons.append(
                f"qk_clip = True: --burst-check {Check.REFERENCE} looks past it: drop it"
            )
        refuse_all(f"layer {layer_number} cannot use burst", reasons)
        self._shared = shared
        self.context = shared.contexts.of(config, pg_collection)
        self._attn_mask_type = attn_mask_type
        self._softmax_scale = softmax_scale
        self._window = window_of(config, layer_number)
        self._layer_number = layer_number
        # Under this name Megatron's optimizer takes it, a step's: see `clip_qk`.
        self.current_max_attn_logits: Tensor | None = None
        self.latents: Callable[[int], Latents] | None = None  # of MLA, by the number of samples
        self.name_layer(str(layer_number))

    @property
    def may_send_latents(self) -> bool:
        """Whether there is a group, of the model or of micro-batches, over which they can go."""
        return any(context.can_send_latents for context in (self.context, *self._shared.contexts))

    def name_layer(self, name: str) -> None:
        """Set the name of the layer in what is said by the checks, which begin anew."""
        attend = self._attend_and_look if self._clips else ring_attention
        self._attend: Callable[..., Tensor] = attend
        self._check: LayerCheck | None = None
        given = self.config, self._layer_number, self._softmax_scale
        if self._shared.verification is not None:
            self._check = LayerCheck(self._shared.verification, name, *given)
            self._attend = self._check
        if self._shared.layer_config.check is Check.NAN:
            self._attend = with_nan_check(self._attend, name)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        /,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend: query [s, b, heads, d], key [s, b, kv heads, d], value [s, b, kv heads, dv].

        Returns [s, b, heads · dv]. `s` is this rank's part of the sequence in the layout's order.
        Under Megatron's "thd" b is missing, and each document is in a zigzag of its own: returns
        [s, heads, dv].

        Raises:
            ValueError: a mask, bias or packing that the ring would have to ignore, or a layout to
                which nobody moves the tokens.
        """
        mask_type = attn_mask_type or self._attn_mask_type
        context = self._shared.contexts.of_micro_batch(packed_seq_params, self.context)
        with context.agreed.told(f"layer {self._layer_number}"):
            self._refuse(attention_mask, attention_bias, context)
            _refuse_generation(query, key)
            documents = self._documents(packed_seq_params, query, context)
            mask = self._mask(mask_type, documents)
        is_thd = not isinstance(packed_seq_params, PackedDocuments | None)
        checkpoints = self._shared.checkpoints if self.training else None
        memory = None if checkpoints is None else checkpoints.memory(self, query)
        if is_thd and self.config.multi_latent_attention:  # whose values Megatron widens
            value = value[..., : self.config.v_head_dim]
        if query.ndim == 3:  # from MLA, too, which drops a batch dimension of 1
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))  # sbhd -> bshd
        latents = None
        if self.latents is not None and context.can_send_latents:
            latents = self.latents(query.shape[1])
        if self._check is not None:
            self._check.expect(_IS_CAUSAL[mask_type], documents, self.training)
        sent = context.bytes_sent
        out = self._attend(
            q,
            k,
            v,
            context,
            mask=mask,
            softmax_scale=self._softmax_scale,
            sink=self.softmax_offset,
            latents=latents,
            layout=documents.layout,
            memory=memory,
        )
        if not self.training:
            self._shared.contexts.bytes_sent_in_evaluation += context.bytes_sent - sent
        return out[0] if is_thd else out.transpose(0, 1).flatten(2)

    def _attend_and_look(
        self, q: Tensor, k: Tensor, v: Tensor, context: BurstContext, **more: Any
    ) -> Tensor:
        """Attend as `ring_attention` does, and take the largest score of each head.

        Of a checkpointed layer in the second pass.
        """
        if not (self.training and torch.is_grad_enabled()):
            return ring_attention(q, k, v, context, **more)
        out, lse = ring_attention(q, k, v, context, return_lse=True, **more)
        layout = more["layout"] or context.layout(q.shape[1] * context.ranks)
        scale = q.shape[3] ** -0.5 if (given := more["softmax_scale"]) is None else given
        settings = context, more["mask"], layout, scale, self.config.qk_clip_threshold
        largest, before = largest_scores(q, k, lse, *settings), self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else torch.maximum(largest, before)
        return out

    def _documents(self, packed: Any, query: Tensor, context: BurstContext) -> PackedDocuments:
        """Return the packed sequences, those of Megatron's "thd" too."""
        if isinstance(packed, PackedDocuments | None):
            documents = packed or self._shared.whole
        elif getattr(packed, "qkv_format", None) != "thd":
            raise ValueError(
                "packed_seq_params cannot be honoured in a ring but with qkv_format thd, or with "
                "the pre-wrap hook SequenceHooks"
            )
        elif query.ndim != 3:
            raise ValueError(
                f"packed_seq_params for {query.shape[1]} samples that are not one sequence: pass "
                "--micro-batch-size 1"
            )
        else:
            rotates = context.group if context is self.context else self._megatrons_group()
            documents = self._shared.read(packed, context.group, rotates)
        tokens = query.shape[0] * context.ranks
        if documents.bounds and documents.bounds[-1] != tokens:
            raise ValueError(
                f"the documents end at {documents.bounds[-1]}, and the {context.ranks} "
                f"context-parallel ranks hold {tokens} tokens: pass cu_seqlens that end there, "
                "with their padding"
            )
        return documents

    def _mask(self, mask_type: AttnMaskType, documents: PackedDocuments) -> Mask:
        if mask_type not in _IS_CAUSAL:
            raise ValueError(
                f"attention mask type {mask_type.name} is not supported; there are: "
                f"{', '.join(m.name for m in _IS_CAUSAL)}"
            )
        left, none_behind = self._window
        return self._shared.masks.of(_IS_CAUSAL[mask_type] or none_behind, left, documents)

    def _refuse(self, mask: Tensor | None, bias: Tensor | None, context: BurstContext) -> None:
        if context.config.mla is Mla.LATENT and not self.latents and context.ranks > 1:
            raise ValueError(
                f"--burst-mla {Mla.LATENT}: layer {self._layer_number} is no MLASelfAttention of "
                "Megatron's that was built of our spec; drop it"
            )
        if not self._shared.follows_layout and context.ranks > 1:
            config = self._shared.config
            meant = "contiguous" if config.is_zigzag else f"in --burst-layout {config.layout}"
            raise ValueError(
                f"the tokens are in Megatron's zigzag, not {meant}: append "
                "SequenceHooks(shared) to the pre_wrap_hooks of the model's config"
            )
        for name, given, instead in (
            ("attention_mask", mask, "--no-create-attention-mask-in-dataloader"),
            ("attention_bias", bias, "no attention bias"),
        ):
            if given is not None:
                raise ValueError(f"{name} cannot be honoured in a ring; use {instead}")


def _refuse_generation(query: Tensor, key: Tensor) -> None:
    """Refuse a prompt in inference, and what follows one: fewer queries than keys.

    Megatron's mode alone stays on behind a static engine, for evaluations of other models, too.
    """
    prompt = InferenceMode.is_active() and torch.is_inference_mode_enabled()
    if prompt or query.shape[0] != key.shape[0]:
        raise ValueError(
            "our attention generates no tokens: drop --context-parallel-algo, what it has trained "
            "fits Megatron's own attention"
        )


def window_of(config: TransformerConfig, layer_number: int) -> tuple[int | None, bool]:
    """Return how many keys before it a query of this layer sees, and whether none behind it.

    Of Megatron's two numbers -1 is no limit.
    """
    size = config.window_size
    if not is_layer_window_attention(size, config.window_attn_skip_freq, layer_number):
        return None, False
    left, right = size
    return (None if left == -1 else left), right == 0
