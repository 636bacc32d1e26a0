"""A training step as one rank of a ring has it, on fake tensors: nothing is computed or sent.

A GPTModel of Megatron's, of its local layers with our attention. The tensors are the CPU's, because
autograd's engine asks the driver about fake CUDA tensors; what is chosen by the device is chosen as
on a GPU: Triton's kernels and the chunks of heads. What is in the host's memory is on `HOST`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import empty_kernels
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.config import LmHeadConfig
from megatron_burst.kernels import in_triton
from megatron_burst.plans.choice.head_chunks import choose_head_chunks
from megatron_burst.plugin.attention.contexts import Contexts
from megatron_burst.plugin.attention.shared_state import SharedState
from megatron_burst.plugin.hooks.lm_head import ChunkedHead
from megatron_burst.plugin.hooks.mlp import ChunkedMlps
from megatron_burst.plugin.hooks.offload import OffloadInputs
from megatron_burst.plugin.layer_spec import burst_layer_spec
from megatron_burst.plugin.local_layers import block_spec
from megatron_burst.plugin.training_config import LayerConfig, MlpConfig
from megatron_burst.tools.one_rank import Silence, context_of

SAVINGS = "chunked_loss", "offload", "mlp", "head_chunks"  # in the order of the ladder
HOST = "cuda"  # of tensors in its memory
_BY_LAYERS: dict[str, Any] = {"recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Settings:
    """One rank's step: an 8B-shaped model unless said otherwise."""

    layers: int = 4
    tokens: int = 131072  # of this rank
    ranks: int = 8  # of the ring, on one node
    tensor: int = 1  # tensor-parallel size
    sequence_parallel: bool = True  # where that is more than 1
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    qk_norm: bool = False
    gated: bool = True  # the MLP
    mlp_chunks_for_training: int = 1  # Megatron's own
    recompute: str | None = "full"  # by layers; "selective": attention alone
    savings: frozenset[str] = frozenset()  # of SAVINGS
    head_chunks: int | None = None  # with that saving; None: as `auto` has it on a GPU
    fused: bool = False  # saves what the fused layers of TransformerEngine save, by their sources

    @property
    def x(self) -> int:
        """The bytes of hidden states, in which the rest is told."""
        return self.tokens * self.hidden * 2


def model_of(settings: Settings) -> Any:
    """Build the model as our flags do; its gradients go to `main_grad`, as Megatron's DDP does."""
    has = settings.savings.__contains__
    chunks = 1
    if has("head_chunks"):
        heads = settings.heads // settings.tensor, max(1, settings.kv_heads // settings.tensor)
        burst = BurstConfig(head_chunks=settings.head_chunks)
        chunks = choose_head_chunks(burst, settings.tokens, *heads)
    config = _config(settings)
    layers = LayerConfig(recompute_offload=has("offload"))
    shared = SharedState(BurstConfig(head_chunks=chunks), layer_config=layers)
    shared.contexts = _Silent(shared.config, layers, None, shared.masks)
    silence = shared.config, Silence(settings.ranks)
    shared.contexts.context = context_of(settings.ranks // 2, [0] * settings.ranks, *silence)
    normed = {"normalization": "RMSNorm", "qk_layernorm": settings.qk_norm}
    spec = burst_layer_spec(get_gpt_layer_local_spec(**normed), shared)
    model = GPTModel(
        config,
        block_spec(spec, config),
        vocab_size=settings.vocabulary,
        max_sequence_length=settings.tokens * settings.ranks,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    for weight in model.parameters():
        weight.data = weight.data.bfloat16()
        weight.main_grad = torch.empty(weight.shape)
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(_drop)
    if settings.fused:
        for layer in model.decoder.layers:
            _fuse_norms(layer)
    if has("offload"):
        OffloadInputs(None)([model])
    if has("chunked_loss"):
        ChunkedHead(LmHeadConfig())([model])
    if has("mlp"):
        ChunkedMlps(MlpConfig(chunks=None))([model])
    return model


def _fuse_norms(layer: Any) -> None:
    """Make norms part of the products behind them, in the MLP's chunks then, too.

    In the place of attention's, which saves its norm's input and output, these save one each.
    """
    places = ("input_layernorm", layer.self_attention.linear_qkv)
    for name, linear in (places, ("pre_mlp_layernorm", layer.mlp.linear_fc1)):
        norm, multiply = getattr(layer, name), linear.forward
        setattr(layer, name, IdentityOp())
        linear.norm = norm  # whose parameter is the MLP's then
        linear.forward = lambda x, norm=norm, multiply=multiply: multiply(norm(x))


class _Rotated(torch.autograd.Function):
    """Rotary embeddings of one kernel: it saves their angles alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, **_: Any) -> Tensor:
        ctx.save_for_backward(angles)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(gradient.shape), None


def _rotated(x: Tensor, angles: Tensor, **_: Any) -> Tensor:
    return _Rotated.apply(x, angles)


def _swiglu(x: Tensor) -> Tensor:
    """Stand in for what Megatron compiles to one kernel; so does the next."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _swiglu_back(_: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _drop(weight: Tensor) -> None:
    weight.grad = None


def _config(settings: Settings) -> TransformerConfig:
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        ffn_hidden_size=settings.ffn,
        mlp_chunks_for_training=settings.mlp_chunks_for_training,
        num_attention_heads=settings.heads,
        num_query_groups=settings.kv_heads,
        context_parallel_size=settings.ranks,
        tensor_model_parallel_size=settings.tensor,
        sequence_parallel=settings.sequence_parallel and settings.tensor > 1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        qk_layernorm=settings.qk_norm,
        add_bias_linear=False,
        gated_linear_unit=settings.gated,
        activation_func=functional.silu if settings.gated else functional.gelu,
        bias_activation_fusion=settings.gated,
        bf16=True,
        params_dtype=torch.bfloat16,
        apply_rope_fusion=settings.fused,
        use_cpu_initialization=True,
        perform_initialization=False,
        recompute_granularity=settings.recompute,
        **(_BY_LAYERS if settings.recompute == "full" else {}),
    )


class _Silent(Contexts):
    """Gives layers a context that sends nothing."""

    context: BurstContext

    def of(self, *_: Any) -> BurstContext:
        return self.context


@contextmanager
def without_a_gpu(host: str) -> Iterator[None]:
    """Replace what asks for a GPU; what would be pinned is on the device `host`."""
    done = mock.MagicMock()  # a stream, its context and an event
    make, empty, random = torch.tensor, torch.empty, tensor_parallel.random
    pinned = {"device": host}
    with (
        mock.patch.multiple(
            torch.cuda,
            current_device=lambda: torch.device("cpu"),
            manual_seed=lambda _: None,
            Stream=lambda _: done,
            stream=lambda _: done,
            current_stream=lambda _=None: done,
        ),
        mock.patch.multiple(
            torch,
            tensor=lambda *given, pin_memory=False, **named: make(*given, **named),
            empty=lambda *a, pin_memory=0, **k: empty(*a, **k | (pinned if pin_memory else {})),
        ),
        mock.patch.object(Tensor, "cuda", lambda x, *_, **__: x),
        mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        mock.patch.object(random, "_get_cuda_rng_state", lambda *_, **__: None),
        mock.patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None),
    ):
        yield


@contextmanager
def as_on_a_gpu(settings: Settings) -> Iterator[None]:
    """Replace what asks for a device, or for the other ranks."""
    world = settings.ranks * settings.tensor
    dist.init_process_group("fake", rank=world // 2, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor,
            context_parallel_size=settings.ranks,
            create_gloo_process_groups=False,
        )
        with (
            torch._dynamo.config.patch(disable=True),
            without_a_gpu(HOST),
            mock.patch.object(Tensor, "__bool__", lambda _: False),
            empty_kernels(),
            mock.patch.object(in_triton, "why_plain", lambda *_: ""),
            mock.patch.multiple(fused_bias_swiglu, swiglu=_swiglu, swiglu_back=_swiglu_back),
            mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb", _rotated),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
