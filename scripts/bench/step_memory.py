#!/usr/bin/env python
"""Counts the bytes that live in a training step, from the embedding to the loss and back.

    python scripts/bench/step_memory.py --layers 3 --save offload mlp head_chunks

A GPTModel of Megatron's, of its local layers with our attention, as one rank of a ring has it, on
fake tensors: nothing is computed or sent. Weights, main gradients and optimizer are not counted,
and neither is what a kernel uses inside. The tensors are the CPU's, because autograd's engine asks
the driver about fake CUDA tensors; what is chosen by the device is chosen as on a GPU: Triton's
kernels and the chunks of heads. What is in the host's memory is a fake CUDA tensor.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.attention import context as contexts
from megatron_burst.config import LmHeadConfig, MlpConfig
from megatron_burst.kernels import TileCall, in_triton
from megatron_burst.plans.head_chunks import choose_head_chunks
from megatron_burst.plugin.attention.core_attention import SharedState
from megatron_burst.plugin.hooks.lm_head import ChunkedHead
from megatron_burst.plugin.hooks.mlp import ChunkedMlps
from megatron_burst.plugin.hooks.offload import OffloadInputs
from megatron_burst.plugin.layer_spec import burst_layer_spec
from megatron_burst.plugin.local_layers import block_spec
from megatron_burst.plugin.row_chunks import is_in_backward
from megatron_burst.tools.live_bytes import LiveBytes
from megatron_burst.tools.one_rank import Silence, context_of
from megatron_burst.transport.host import PinnedBuffers

SAVINGS = "chunked_loss", "offload", "mlp", "head_chunks"  # in the order of the ladder
# The last two are of a layer's backward: its replay with the MLP's backward, and then attention's.
PHASES = "forward", "loss", "mlp", "attention"
_HOST = "cuda"  # of tensors in its memory


@dataclass(frozen=True)
class Settings:
    """One rank's step: an 8B-shaped model unless said otherwise, full recompute by layers."""

    layers: int = 4
    tokens: int = 131072  # of this rank
    ranks: int = 8  # of the ring, on one node
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    savings: frozenset[str] = frozenset()  # of SAVINGS
    head_chunks: int | None = None  # with that saving; None: as `auto` has it on a GPU
    fused: bool = False  # saves what the fused layers of TransformerEngine save, by their sources

    @property
    def x(self) -> int:
        """The bytes of hidden states, in which the rest is told."""
        return self.tokens * self.hidden * 2


@dataclass
class StepMemory:
    """Bytes beyond the states, at the peak of each phase, and who made them."""

    settings: Settings
    peaks: dict[str, int]
    makers: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    def in_x(self, phase: str) -> float:
        return self.peaks[phase] / self.settings.x


def measure(settings: Settings) -> StepMemory:
    """Count a step; the loss is with its backward."""
    unknown = settings.savings - {*SAVINGS}
    if unknown:
        raise ValueError(f"no such savings: {', '.join(unknown)}; there are {', '.join(SAVINGS)}")
    with _as_on_a_gpu(settings), FakeTensorMode(allow_non_fake_inputs=True):
        model = _model(settings)
        tokens = torch.zeros(1, settings.tokens, dtype=torch.long)
        kept = [tokens, *model.parameters(), *(p.main_grad for p in model.parameters())]
        kept += model.buffers()
        with _Phases(kept) as live:
            _watch(model, live)
            losses = model(tokens, tokens, None, labels=tokens)
            losses.sum().backward()
    return StepMemory(settings, live.peaks, live.makers)


def shares(settings: Settings) -> tuple[StepMemory, dict[str, float]]:
    """Return the step, and how many bytes each layer more adds to the peak of every phase."""
    found = measure(settings)
    fewer = measure(replace(settings, layers=settings.layers - 1))
    return found, {phase: found.peaks[phase] - fewer.peaks[phase] for phase in PHASES}


class _Phases(LiveBytes):
    """The peak of each phase."""

    def __init__(self, existing: list[Tensor]) -> None:
        super().__init__(existing)
        self.phase = PHASES[0]
        self.peaks = dict.fromkeys(PHASES, 0)
        self.makers: dict[str, Counter[str]] = {}
        self._made: dict[int, tuple[str, int]] = {}
        self._function = ""

    def begin(self, phase: str) -> None:
        """From now on what lives is counted for this phase."""
        if phase != self.phase:
            self.phase = phase
            self._see()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self._function = function.overloadpacket.__name__
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.device.type != _HOST:
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._seen:
            return
        self._made[storage._cdata] = f"{self._function} in {_caller()}", storage.nbytes()
        super()._count(storage)
        self._see()

    def _see(self) -> None:
        if self.now > self.peaks[self.phase]:
            self.peaks[self.phase] = self.now
            self.makers[self.phase] = Counter()
            for made_by, size in self._made.values():
                self.makers[self.phase][made_by] += size

    def _forget(self, key: int, size: int) -> None:
        super()._forget(key, size)
        self._made.pop(key, None)


def _caller() -> str:
    """Return the file and function of Megatron, or of the package, whose line made a tensor."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = Path(code.co_filename)
        if {"megatron", "megatron_burst"} & {*name.parts[:-1]}:
            return f"{name.stem}.{code.co_name}"
        frame = frame.f_back
    return "autograd"


def _watch(model: Any, live: _Phases) -> None:
    """Say when phases begin: the loss behind the decoder, the others where a layer is replayed."""

    def replayed(*_: Any) -> None:
        if is_in_backward():
            live.begin("mlp")

    def attended(_: Any, __: Any, output: Tensor) -> None:
        if is_in_backward():
            output.register_hook(lambda _: live.begin("attention"))

    model.decoder.register_forward_hook(lambda *_: live.begin("loss"))
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(replayed)
        layer.self_attention.core_attention.register_forward_hook(attended)


def _model(settings: Settings) -> Any:
    """Build the model as our flags do; its gradients go to `main_grad`, as Megatron's DDP does."""
    has = settings.savings.__contains__
    chunks = 1
    if has("head_chunks"):
        sizes = settings.tokens, settings.heads, settings.kv_heads
        chunks = choose_head_chunks(BurstConfig(head_chunks=settings.head_chunks), *sizes)
    config = _config(settings)
    shared = _Shared(BurstConfig(head_chunks=chunks, recompute_offload=has("offload")))
    shared.context = _context(settings, shared.config)
    spec = burst_layer_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), shared)
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
        num_attention_heads=settings.heads,
        num_query_groups=settings.kv_heads,
        context_parallel_size=settings.ranks,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        apply_rope_fusion=settings.fused,
        use_cpu_initialization=True,
        perform_initialization=False,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )


class _Shared(SharedState):
    """Gives layers a context that sends nothing."""

    context: BurstContext

    def get_megatrons(self, *_: Any, **__: Any) -> BurstContext:
        return self.context


def _context(settings: Settings, config: BurstConfig) -> BurstContext:
    rank = settings.ranks // 2
    return context_of(rank, [0] * settings.ranks, config, Silence(settings.ranks))


class _EmptyKernel:
    """Returns what a kernel returns, without values."""

    name = "empty"

    def forward(self, tile: TileCall) -> tuple[Tensor, Tensor]:
        q, _, v = tile.qkv
        lse_BHS = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return q.new_empty((*q.shape[:3], v.shape[3])), lse_BHS

    def backward(self, tile: TileCall, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in tile.qkv)


class _AllIsDone:
    """A stream, its context and an event."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass

    wait_event = wait_stream

    def record_event(self) -> None:
        pass


@contextmanager
def _as_on_a_gpu(settings: Settings) -> Iterator[None]:
    """Replace what asks for a device, or for the other ranks."""

    def put(where: Any, **names: Any) -> None:
        for name, value in names.items():
            patches.enter_context(mock.patch.object(where, name, value))

    rank, world = settings.ranks // 2, settings.ranks
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with ExitStack() as patches:
        patches.callback(dist.destroy_process_group)
        parallel_state.initialize_model_parallel(
            context_parallel_size=world, create_gloo_process_groups=False
        )
        patches.callback(parallel_state.destroy_model_parallel)
        patches.enter_context(torch._dynamo.config.patch(disable=True))
        random, done = tensor_parallel.random, _AllIsDone()
        put(torch.cuda, current_device=lambda: torch.device("cpu"), manual_seed=lambda _: None)
        put(torch.cuda, Stream=lambda _: done, stream=lambda _: done)
        put(torch.cuda, current_stream=lambda _=None: done)
        make = torch.tensor
        put(torch, tensor=lambda *given, pin_memory=False, **named: make(*given, **named))
        put(Tensor, cuda=lambda x, *_, **__: x, __bool__=lambda _: False)
        put(random, _get_cuda_rng_state=lambda *_, **__: None)
        put(random, _set_cuda_rng_state=lambda *_, **__: None)
        put(PinnedBuffers, take=_in_the_host, give=lambda *_: None)
        put(contexts, select_kernel=lambda *_: _EmptyKernel(), log_choice=lambda *_: None)
        put(in_triton, why_plain=lambda *_: "")
        if settings.fused:
            put(rope_utils, fused_apply_rotary_pos_emb=_rotated)
            put(fused_bias_swiglu, swiglu=_swiglu, swiglu_back=_swiglu_back)
        yield


def _in_the_host(_: PinnedBuffers, nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=_HOST)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("layers", "tokens", "ranks", "hidden", "ffn", "heads", "kv_heads", "vocabulary"):
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(Settings, name))
    parser.add_argument("--save", nargs="*", choices=[*SAVINGS, "all"], help="none: every rung")
    parser.add_argument("--head-chunks", type=int, help="with that saving; default: auto's")
    parser.add_argument("--fused", action="store_true", help="as TransformerEngine's layers save")
    parser.add_argument("--makers", type=int, default=0, help="how many lines of what lives then")
    args = vars(parser.parse_args())
    asked, most = args.pop("save"), args.pop("makers")
    if asked is None:
        rungs = [frozenset(SAVINGS[:n]) for n in range(len(SAVINGS) + 1)]
    else:
        rungs = [frozenset(SAVINGS if "all" in asked else asked)]
    for savings in rungs:
        _report(Settings(**args, savings=savings), most)


def _report(settings: Settings, makers: int) -> None:
    found, more = shares(settings)
    print(
        f"with {', '.join(sorted(settings.savings)) or 'nothing'}; x = {settings.x / 2**30:g} GiB"
    )
    for phase in PHASES:
        share = f"{more[phase] / settings.x:.2f} x a layer more"
        print(f"  {phase:10}{found.in_x(phase):7.2f} x, {share}")
        for name, size in found.makers[phase].most_common(makers):
            print(f"    {size / settings.x:9.2f} x  {name}")


if __name__ == "__main__":
    main()
