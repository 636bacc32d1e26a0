"""All savings of memory at once, in models of Megatron's of one rank. (fast tier)

tests/training compares losses and norms over ranks; here every parameter's gradient.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.attention.saved import AttentionMemory, SavedRows
from megatron_burst.config import LmHeadConfig, LmHeadLoss
from megatron_burst.plugin.training_config import LayerConfig, MlpConfig
from megatron_burst.tools.one_rank import Silence, context_of

pytest.importorskip("megatron.core.models.gpt")

from fake_step import without_a_gpu  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_burst.plugin.attention.contexts import Contexts  # noqa: E402
from megatron_burst.plugin.attention.recompute import RecomputeHooks  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.hooks.lm_head import ChunkedHead  # noqa: E402
from megatron_burst.plugin.hooks.mlp import ChunkedMlp, ChunkedMlps  # noqa: E402
from megatron_burst.plugin.hooks.offload import OffloadInputs  # noqa: E402
from megatron_burst.plugin.layer_spec import burst_layer_spec, stack_spec  # noqa: E402
from megatron_burst.plugin.local_layers import block_spec  # noqa: E402
from megatron_burst.transport.host import HostMemory, PinnedBuffers  # noqa: E402

TOKENS, VOCABULARY, LAYERS = 48, 96, 3
HEAD = LmHeadConfig(loss=LmHeadLoss.CHUNKED, chunk_size=10)
SAVING = BurstConfig(head_chunks=2, recompute_fraction=0.5)


class Alone(Contexts):
    """Of one rank, which sends nothing."""

    context: BurstContext

    def of(self, *_: Any) -> BurstContext:
        return self.context


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with without_a_gpu("cpu"):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def transformer(**more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        ffn_hidden_size=80,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        **more,
    )


def model_of(kind: str, together: int | None = None, *, saves: bool) -> Any:
    """Make it, with checkpoints of so many layers; None: of one attention each."""
    torch.manual_seed(5)
    config = SAVING if saves else BurstConfig(head_chunks=1)
    shared = SharedState(config, layer_config=LayerConfig(recompute_offload=saves))
    shared.contexts = Alone(config, shared.layer_config, None, shared.masks)
    shared.contexts.context = context_of(0, [0], config, Silence(1))
    full: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
    together = together or {"hybrid": 2, "gpt": 1}[kind]
    settings = full | {"recompute_num_layers": together} if saves else {}
    more: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_sequence_length": TOKENS,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "parallel_output": True,
    }
    if kind == "hybrid":
        made = transformer(**settings)
        made.num_layers = 2 * LAYERS
        spec = stack_spec(None, shared)
        model = HybridModel(made, spec, hybrid_layer_pattern="*-" * LAYERS, **more)
    else:
        made = transformer(**settings)
        spec = burst_layer_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), shared)
        model = GPTModel(made, block_spec(spec, made), **more)
    if saves:
        assert shared.checkpoints is not None
        hooks = RecomputeHooks(shared.checkpoints), OffloadInputs(shared.checkpoints)
        model.offload = hooks[1]
        for hook in (*hooks, ChunkedHead(HEAD), ChunkedMlps(MlpConfig(chunks=3))):
            hook([model])
    return model


def losses_of(model: Any) -> torch.Tensor:
    torch.manual_seed(6)
    tokens, labels = torch.randint(VOCABULARY, (2, 1, TOKENS)).unbind()
    losses: torch.Tensor = model(tokens, torch.arange(TOKENS)[None], None, labels=labels)
    return losses


@pytest.mark.parametrize(
    ("kind", "together"), [("gpt", 1), ("gpt", 2), ("hybrid", 2), ("hybrid", 3)]
)
def test_the_gradient_of_every_parameter_equals_that_without(
    monkeypatch: pytest.MonkeyPatch, kind: str, together: int
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    kept: list[bool] = []
    recall = AttentionMemory.recall

    def recalled(memory: AttentionMemory) -> SavedRows | None:
        kept.append(memory.saved is not None)
        return recall(memory)

    monkeypatch.setattr(AttentionMemory, "recall", recalled)
    for saves in (False, True):
        model = model_of(kind, together, saves=saves)
        losses = losses_of(model)
        losses.sum().backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        found.append({"losses": losses.detach(), **gradients})
    assert sum(kept) == LAYERS  # in their second pass, wherever in a checkpoint they are
    expected, saved = found
    assert expected.keys() == saved.keys()
    for name, value in expected.items():
        worst = (saved[name] - value).norm() / value.norm()
        assert worst < 1e-6, (name, worst)


@pytest.mark.parametrize(
    ("kind", "together", "read", "last"),
    [("gpt", 1, 0, 3), ("gpt", 2, 1, 2), ("hybrid", 2, 0, 3), ("hybrid", 3, 2, 2)],
)
def test_a_replay_makes_the_output_of_an_mlp_where_a_layer_is_behind_it(
    monkeypatch: pytest.MonkeyPatch, kind: str, together: int, read: int, last: int
) -> None:
    """The last layer of a checkpoint returns nothing, and its three chunks run once, backward."""
    model, run = model_of(kind, together, saves=True), ChunkedMlp.run
    losses, ran, sizes = losses_of(model), [], []
    monkeypatch.setattr(ChunkedMlp, "run", lambda mlp, x: ran.append(x) or run(mlp, x))
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda *given: sizes.append(len(given[2][0].untyped_storage())))
    losses.sum().backward()
    assert len(ran) == 3 * (LAYERS + read)
    assert sum(size < TOKENS for size in sizes) == last


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_an_input_comes_back_behind_attention(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Not beside the MLP behind it, though that is a layer of its own in a hybrid model."""
    seen: list[str] = []
    model, back = model_of(kind, saves=True), HostMemory.start_back

    def arriving(host: HostMemory, *there: Any) -> Any:
        if host is model.offload._host:
            seen.append("input")
        return back(host, *there)

    def projected(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        if output[0].requires_grad:
            output[0].register_hook(lambda _: seen.append("attention"))

    monkeypatch.setattr(HostMemory, "start_back", arriving)
    losses = losses_of(model)
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "linear_fc2"):
            layer.mlp.register_forward_pre_hook(lambda *_: seen.append("MLP"))
        if hasattr(layer.self_attention, "linear_proj"):
            layer.self_attention.linear_proj.register_forward_hook(projected)
    losses.sum().backward()
    assert seen == [*["MLP", "attention", "input"] * (LAYERS - 1), "MLP", "attention"]


@pytest.mark.parametrize("place", ["mlp", "self_attention"])
@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
def test_a_forward_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: str
) -> None:
    """Neither in the host's memory nor of the graph, before another forward begins."""
    buffers: Counter[str] = Counter()
    take, give = PinnedBuffers.take, PinnedBuffers.give

    def taken(own: PinnedBuffers, nbytes: int) -> torch.Tensor:
        buffers["taken"] += 1
        return take(own, nbytes)

    def given(own: PinnedBuffers, these: Sequence[torch.Tensor]) -> None:
        buffers["given"] += len(these)
        give(own, these)

    monkeypatch.setattr(PinnedBuffers, "take", taken)
    monkeypatch.setattr(PinnedBuffers, "give", given)
    model = model_of(kind, saves=True)
    layer = [each for each in model.decoder.layers if hasattr(getattr(each, place), "config")][-1]
    last = layer.mlp.linear_fc2 if place == "mlp" else layer.self_attention.linear_proj
    planted = last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        losses_of(model)
    planted.remove()
    gc.collect()
    assert buffers["taken"] >= LAYERS and buffers["taken"] == buffers["given"]
