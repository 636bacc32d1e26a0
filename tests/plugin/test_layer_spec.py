"""Our core attention in Megatron's layer specs, built and called as Megatron does. (fast tier)"""

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from packaging.version import Version
from torch import Tensor

from megatron_burst import BurstConfig
from tests import oracle

gpt_layer_specs = pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
pytest.importorskip("megatron.training.models.gpt")
from megatron.core.inference.utils import InferenceMode  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType  # noqa: E402
from megatron_burst.plugin.attention.core_attention import BurstCoreAttention  # noqa: E402
from megatron_burst.plugin.attention.latent_layers import LatentSelfAttention  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.layer_spec import (  # noqa: E402
    LayerSpecProvider,
    burst_layer_spec,
)
from megatron_burst.plugin.local_layers import SequenceParallelNorm  # noqa: E402

LAYERS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"num_experts": 4},
    "mla": {"multi_latent_attention": True},
    "qk_layernorm": {"qk_layernorm": True},
}


def layer(**options: Any) -> ModuleSpec:
    return gpt_layer_specs.get_gpt_layer_local_spec(**options)


def leaves(spec: Any, path: str = "") -> dict[str, Any]:
    """Everything that a spec holds, by where it is; our own ModuleSpec counts as one value."""
    if isinstance(spec, ModuleSpec) and spec.module is CoreAttentionByCommType:
        return {path: spec}
    if isinstance(spec, functools.partial):
        spec = {"func": spec.func, "args": spec.args, "keywords": spec.keywords}
    if hasattr(spec, "__dataclass_fields__") and not isinstance(spec, type):
        spec = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    if isinstance(spec, list | tuple):
        spec = dict(enumerate(spec))
    if not isinstance(spec, dict):
        return {path: spec}
    return {k: v for key, value in spec.items() for k, v in leaves(value, f"{path}.{key}").items()}


def check_replaced(spec: Any, expected_places: int, core: Any = DotProductAttention) -> None:
    before = copy.copy(leaves(spec))
    after = leaves(burst_layer_spec(spec, BurstConfig()))
    assert leaves(spec) == before, "the original has changed"
    assert list(after) == list(before)
    changed = [path for path in before if after[path] != before[path]]
    if latent := [path for path in changed if before[path] is MLASelfAttention]:
        assert after[latent[0]] is LatentSelfAttention
    changed = [path for path in changed if path not in latent]
    assert len(changed) == expected_places
    for path in changed:
        assert path.endswith(".core_attention") and before[path] is core
        assert after[path].module is CoreAttentionByCommType
        assert after[path].params["fallback"] is core


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_core_attention_of_a_layer_is_replaced_and_nothing_else(options: dict[str, Any]) -> None:
    check_replaced(layer(**options), expected_places=1)


@pytest.mark.parametrize("options", [*LAYERS.values(), {"num_experts": 4, "moe_grouped_gemm": 1}])
def test_of_transformer_engines_layers_core_attention_alone_is_replaced(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers and norms stay; without TransformerEngine they are Megatron's placeholders."""
    from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider

    monkeypatch.setattr("megatron.core.utils._te_version", Version("2.17.1"))
    for name in ("TENorm", "TEDotProductAttention"):
        monkeypatch.setattr(gpt_layer_specs, name, getattr(transformer_engine, name), raising=False)
    provider = transformer_engine_spec_provider.TESpecProvider
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider, raising=False)
    for name in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        if getattr(transformer_engine_spec_provider, name, None) is None:
            monkeypatch.setattr(transformer_engine_spec_provider, name, object(), raising=False)
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
    check_replaced(spec, 1, transformer_engine.TEDotProductAttention)


def test_beside_transformer_engine_only_torchs_norms_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.core.transformer.transformer_block.HAVE_TE", True)
    local = SimpleNamespace(transformer=None)
    spec = LayerSpecProvider(layer(), None)(local)  # a layer: its last norm is TransformerEngine's
    assert spec.module is layer().module
    assert SequenceParallelNorm in leaves(spec).values()
    assert WrappedTorchNorm not in leaves(spec).values()


def test_every_layer_of_a_block_is_replaced() -> None:
    layers = [layer(), layer(num_experts=4), layer()]
    check_replaced(TransformerBlockSubmodules(layer_specs=layers), expected_places=3)


def test_the_layers_of_a_block_share_their_contexts() -> None:
    block = burst_layer_spec(TransformerBlockSubmodules(layer_specs=[layer()] * 2), BurstConfig())
    first, second = (
        each.submodules.self_attention.submodules.core_attention for each in block.layer_specs
    )
    assert isinstance(first.params["shared"], SharedState)
    assert first.params["shared"] is second.params["shared"]
    shared = SharedState(BurstConfig())
    spec = burst_layer_spec(layer(), shared)
    assert spec.submodules.self_attention.submodules.core_attention.params["shared"] is shared


@pytest.mark.parametrize(
    "spec",
    [
        ModuleSpec(module=torch.nn.Linear),
        ModuleSpec(module=torch.nn.Linear, params={"core_attention": IdentityOp}),
        ModuleSpec(module=torch.nn.Linear, params={"core_attention": None}),
    ],
)
def test_a_spec_without_core_attention_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match="no core_attention to replace: .*Linear"):
        burst_layer_spec(spec, BurstConfig())


@pytest.mark.parametrize("layers", [[], [ModuleSpec(module=torch.nn.Linear)]])
def test_a_pipeline_stage_without_attention_is_not(layers: list[ModuleSpec]) -> None:
    block = TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
    assert burst_layer_spec(block, BurstConfig()) == block


def test_the_provider_takes_specs_and_functions_with_or_without_a_stage() -> None:
    block = TransformerBlockSubmodules(layer_specs=[layer()])
    stages: list[int | None] = []

    def with_stage(model_config: Any, vp_stage: int | None) -> Any:
        stages.append(vp_stage)
        return block

    # Megatron-Bridge's is the TransformerConfig, Megatron's has one.
    transformer: Any = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    of_megatron = SimpleNamespace(transformer=transformer)
    for spec, model_config in (
        (block, of_megatron),
        (lambda model_config: block, transformer),
        (with_stage, of_megatron),
    ):
        ours = LayerSpecProvider(spec, SharedState(BurstConfig()))(model_config, vp_stage=1)
        core = ours.layer_specs[0].submodules.self_attention.submodules.core_attention
        assert core.module is CoreAttentionByCommType
        kept = LayerSpecProvider(spec, None)(model_config, vp_stage=1)
        core = kept.layer_specs[0].submodules.self_attention.submodules.core_attention
        assert core is DotProductAttention
    assert stages == [1, 1]


# What is built from the spec.


class SoftCapped(torch.nn.Module):
    """A core attention of a user's own, which keeps what it is built with."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options


def build(algorithm: str = "burst", **changes: Any) -> Any:
    settings = {"attention_dropout": 0.0, **changes.pop("config", {})}
    shared = changes.pop("shared", None) or SharedState(BurstConfig(algorithm=algorithm))
    fallback = changes.pop("fallback", DotProductAttention)
    options = {
        "config": TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, **settings
        ),
        "layer_number": 2,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "softmax_scale": None,
        "pg_collection": SimpleNamespace(cp=None),  # this process alone
        **changes,
    }
    params = {"shared": shared, "fallback": fallback}
    return build_module(ModuleSpec(module=CoreAttentionByCommType, params=params), **options)


@pytest.mark.parametrize("algorithm", ["burst", "ring"])
def test_our_name_or_none_builds_our_core_attention_without_parameters(algorithm: str) -> None:
    for options in ({}, {"cp_comm_type": None}, {"cp_comm_type": algorithm}):
        module = build(algorithm, **options)
        assert isinstance(module, BurstCoreAttention)
        assert not list(module.parameters()) and not module.state_dict()


@pytest.mark.parametrize("cp_comm_type", ["p2p", "a2a", "all_gather"])
def test_another_name_builds_what_stood_there_with_the_same_arguments(cp_comm_type: str) -> None:
    module = build(cp_comm_type=cp_comm_type, fallback=SoftCapped)
    assert isinstance(module, SoftCapped)
    assert set(module.options) == {
        *("config", "layer_number", "attn_mask_type", "attention_type", "cp_comm_type"),
        *("softmax_scale", "pg_collection"),
    }
    assert module.options["cp_comm_type"] == cp_comm_type
    assert module.options["layer_number"] == 2


class Derived(DotProductAttention):
    """Derived for a reason that we do not know."""


OWN = [
    SoftCapped,
    Derived,
    ModuleSpec(module=SoftCapped, params={"cap": 30.0}),
    ModuleSpec(module=(__name__, "SoftCapped")),
    functools.partial(SoftCapped, cap=30.0),
]


@pytest.mark.parametrize("cp_comm_type", ["burst", None])
@pytest.mark.parametrize("own", OWN)
def test_another_class_than_megatrons_two_is_not_replaced(
    own: Any, cp_comm_type: str | None
) -> None:
    """Megatron passes no name at a CP size of 1: that is no leave to replace it."""
    name = "Derived" if own is Derived else "SoftCapped"
    with pytest.raises(ValueError, match=f"layer 2 has {name} for its core attention") as refused:
        build(cp_comm_type=cp_comm_type, fallback=own)
    text = str(refused.value)
    assert "one of p2p, all_gather, a2a, a2a+p2p for this layer in --cp-comm-type" in text
    assert "drop --context-parallel-algo" in text


@pytest.mark.parametrize("names", [["burst", "p2p"], "p2p"])
@pytest.mark.parametrize("passed", ["p2p", None])
def test_a_class_of_the_users_own_stands_beside_ours(names: Any, passed: str | None) -> None:
    """At every CP size, and under MLA, whose base class is built without a name first."""
    for own in (SoftCapped, *OWN[2:]):
        module = build(cp_comm_type=passed, fallback=own, config={"cp_comm_type": names})
        assert isinstance(module, SoftCapped)
        assert module.options["cp_comm_type"] == passed
        assert module.options.get("cap") == (30.0 if own in (OWN[2], OWN[4]) else None)
    if names != "p2p":
        first = build(layer_number=1, config={"cp_comm_type": names})
        assert isinstance(first, BurstCoreAttention)


@pytest.mark.parametrize("wrapped", [ModuleSpec(module=DotProductAttention), "TEDotProduct", None])
def test_megatrons_two_are_replaced_however_the_spec_has_them(wrapped: Any) -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    stock = wrapped or functools.partial(DotProductAttention)
    stock = TEDotProductAttention if wrapped == "TEDotProduct" else stock
    assert isinstance(build(fallback=stock), BurstCoreAttention)


def test_what_a_spec_adds_to_megatrons_own_is_not_lost() -> None:
    added = ModuleSpec(module=DotProductAttention, params={"attention_dropout": 0.1})
    with pytest.raises(ValueError, match="attention_dropout = 0.1: only 0 is possible"):
        build(fallback=added)


def test_a_class_that_knows_no_block_mask_is_not_built_beside_one(tmp_path: Path) -> None:
    numpy.save(tmp_path / "blocks.npy", numpy.eye(2, dtype=bool))
    shared = SharedState(BurstConfig(block_mask=str(tmp_path / "blocks.npy")))
    with pytest.raises(ValueError, match="layer 2 has SoftCapped, which knows no --burst-block"):
        build(shared=shared, cp_comm_type="p2p", fallback=SoftCapped)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise"])
def test_fp8_linear_layers_leave_attention_in_the_models_dtype(recipe: str) -> None:
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "bf16": True, "params_dtype": torch.bfloat16}
    module = build(config=fp8)
    q, k, v, _ = (x.bfloat16() for x in inputs())
    assert isinstance(module, BurstCoreAttention)
    assert module(q, k, v, None).dtype == torch.bfloat16
    for field in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        with pytest.raises(ValueError, match=f"{field} = True: attention runs in the model's"):
            build(config={**fp8, field: True})


def test_the_name_of_another_algorithm_of_ours_is_refused() -> None:
    assert isinstance(build("ring", cp_comm_type="ring"), BurstCoreAttention)
    with pytest.raises(ValueError, match=r"layer \d: cp_comm_type ulysses, and our .* run burst"):
        build("burst", cp_comm_type="ulysses")


def test_layers_share_what_they_plan() -> None:
    shared = SharedState(BurstConfig(backward="query", kernel="cpu"))
    first, second = (build(shared=shared, cp_comm_type=name).context for name in ("burst", None))
    assert first is second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1: only 0 is possible"),
        (
            {"config": {"attention_dropout": 0.2}},
            "attention_dropout = 0.2: .*--attention-dropout 0",
        ),
        ({"config": {"window_size": (8, 4)}}, r"window_size = \(8, 4\): .* pass --window-size 8,0"),
        ({"attention_type": "cross"}, "attention_type = cross: only self-attention"),
    ],
)
def test_what_a_layer_cannot_do_is_refused_when_it_is_built(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"layer 2 cannot use burst:\n  {message}"):
        build(**changes)


def test_the_context_parallel_group_of_megatron_is_taken_without_a_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(
        "megatron.core.parallel_state.get_context_parallel_group", lambda: asked.append(1)
    )
    build(pg_collection=None)
    assert asked == [1]


def inputs(tokens: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the output's gradient: [s, b, heads, head size]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(tokens, 2, n, 8, generator=generator) for n in (4, 2, 2, 4))


def dense(mask_type: AttnMaskType, scale: float) -> oracle.Result:
    q, k, v, dout = (x.transpose(0, 1) for x in inputs())
    causal = mask_type is AttnMaskType.causal
    # The oracle divides by the root of the head size; put another scale into q.
    ratio = scale * 8**0.5
    found = oracle.attention(q * ratio, k, v, dout, oracle.visible_pairs(6, causal))
    return found._replace(dq=found.dq * ratio)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("built", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("called", [None, AttnMaskType.causal, AttnMaskType.no_mask])
def test_it_equals_dense_attention_in_megatrons_layout(
    built: AttnMaskType, called: AttnMaskType | None, scale: float | None
) -> None:
    module = build(attn_mask_type=built, softmax_scale=scale)
    *qkv, dout = inputs()
    q, k, v = (x.requires_grad_() for x in qkv)
    out = module(q, k, v, None, attn_mask_type=called)
    assert out.shape == (6, 2, 4 * 8)
    out.backward(dout.flatten(2))
    expected = dense(called or built, scale or 8**-0.5)
    assert oracle.relative_error(out.unflatten(2, (4, 8)).transpose(0, 1), expected.out) < 3e-6
    for x, gradient in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        assert oracle.relative_error(x.grad.transpose(0, 1), gradient) < 3e-6


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (torch.ones(1, 1, 6, 6, dtype=torch.bool), {}, "--no-create-attention-mask-in-dataloader"),
        (None, {"attention_bias": torch.zeros(1, 4, 6, 6)}, "attention_bias cannot be honoured"),
        (None, {"packed_seq_params": object()}, "packed_seq_params cannot be honoured"),
        (
            None,
            {"attn_mask_type": AttnMaskType.padding_causal},
            "padding_causal is not supported; there are: causal, no_mask",
        ),
    ],
)
def test_what_a_ring_would_have_to_ignore_is_refused(
    mask: Tensor | None, options: dict[str, Any], message: str
) -> None:
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=message):
        build()(q, k, v, mask, **options)


def test_generation_is_refused_at_the_prompt_and_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (q, k, v, _) = build(), inputs()
    with pytest.raises(ValueError, match="our attention generates no tokens: drop --context-par"):
        module(q[:1], k, v, None)
    monkeypatch.setattr(InferenceMode, "is_active", lambda: True)
    module(q, k, v, None)  # an evaluation
    with torch.inference_mode(), pytest.raises(ValueError, match="generates no tokens"):
        module(q, k, v, None)
