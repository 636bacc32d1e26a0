"""Our attention in Megatron's hybrid stack specs, and the stack of local layers. (fast tier)

tests/training trains with them.
"""

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig
from megatron_burst.plugin.training_config import LayerConfig
from tests.plugin.test_layer_spec import build, leaves

pytest.importorskip("megatron.training.models.gpt")
hybrid_layer_specs = pytest.importorskip("megatron.core.models.hybrid.hybrid_layer_specs")
from megatron.core.extensions import transformer_engine as te  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack  # noqa: E402
from megatron.core.transformer.attention import Attention  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec, build_module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_burst.plugin import attach  # noqa: E402
from megatron_burst.plugin.attention import latent_layers  # noqa: E402
from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType  # noqa: E402
from megatron_burst.plugin.attention.latent_layers import (  # noqa: E402
    LatentLocalSelfAttention,
    LatentSelfAttention,
)
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.hooks.mtp import name_mtp_layers  # noqa: E402
from megatron_burst.plugin.layer_spec import (  # noqa: E402
    LayerSpecProvider,
    StackWithContexts,
    burst_layer_spec,
)
from megatron_burst.plugin.local_layers import (  # noqa: E402
    _FUSED_NORMS,
    LocalHybridStack,
    SequenceParallelNorm,
    local_stack_spec,
)
from megatron_burst.plugin.scans.mixers import DeltaNetOverRanks, MambaOverRanks  # noqa: E402

TES = hybrid_layer_specs.hybrid_stack_spec
STACKS = {"TransformerEngine": (TES, te.TEDotProductAttention)}
STACKS["local"] = (local_stack_spec(), DotProductAttention)


@pytest.mark.parametrize("stack", STACKS)
def test_attention_and_mla_of_a_stack_are_replaced_and_nothing_else(stack: str) -> None:
    spec, core = STACKS[stack]
    before = copy.copy(leaves(spec))
    ours = burst_layer_spec(spec, BurstConfig())
    assert leaves(spec) == before, "the original has changed"
    changed = {
        path: value
        for path, value in leaves(ours).items()
        if path.startswith(".submodules") and value != before.get(path)
    }
    place = ".submodules.{}.submodules.self_attention.{}"
    latents = changed.pop(place.format("mla_layer", "module"))
    assert latents is {"local": LatentLocalSelfAttention}.get(stack, LatentSelfAttention)
    for layer, name in (("mamba_layer", "mixer"), ("gdn_layer", "self_attention")):
        own = changed.pop(f".submodules.{layer}.submodules.{name}.module")
        assert own in (MambaOverRanks, DeltaNetOverRanks)
        assert changed.pop(f".submodules.{layer}.submodules.{name}.params.shared")
    core_attention = "submodules.core_attention"
    sparse = changed.pop(place.format("dsa_layer", core_attention))
    given = {"config": config(), "layer_number": 1, **sparse.params}
    with pytest.raises(ValueError, match="layer 1 has DSAttention"):  # in a layer of MTP, too
        sparse.module(**given)
    assert list(changed) == [
        place.format("attention_layer", core_attention),
        place.format("mla_layer", core_attention),
    ]
    for value in changed.values():
        assert value.module is CoreAttentionByCommType and value.params["fallback"] is core
    assert ours.module is StackWithContexts and ours.params["stack"] is spec.module


def test_the_local_stack_has_no_layer_of_transformer_engine() -> None:
    theirs = [getattr(te, name) for name in dir(te) if name.startswith("TE")]
    found = {
        path
        for path, value in leaves(local_stack_spec()).items()
        if any(value is each for each in theirs if each is not None)
    }
    assert found == set()


@pytest.mark.parametrize("layer", _FUSED_NORMS)
def test_norms_are_saved_under_the_names_of_transformer_engines_stack(layer: str) -> None:
    norm, name = _FUSED_NORMS[layer]
    submodules = getattr(local_stack_spec().submodules, layer).submodules
    assert getattr(submodules, norm) is SequenceParallelNorm
    assert submodules.sharded_state_dict_keys_map == {f"{norm}.": f"{name}.layer_norm_"}
    place, linear = name.split(".")
    whole = getattr(getattr(TES.submodules, layer).submodules, place)
    parts = whole.keywords["submodules"] if place == "mlp" else whole.submodules
    assert getattr(parts, linear) is te.TELayerNormColumnParallelLinear


@pytest.mark.parametrize(
    ("layer", "more", "expected"),
    [
        ("attention_layer", {}, {"q_layernorm", "k_layernorm"}),
        ("mla_layer", {"q_lora_rank": 8}, {"q_layernorm", "kv_layernorm"}),
        ("mla_layer", {"q_lora_rank": None}, {"kv_layernorm"}),
    ],
)
def test_the_local_stack_has_the_norms_of_queries_and_keys(
    monkeypatch: pytest.MonkeyPatch, layer: str, more: dict[str, Any], expected: set[str]
) -> None:
    """Megatron itself takes TransformerEngine's alone."""
    monkeypatch.setattr(Attention, "__init__", lambda self, **given: seen.update(given))
    seen: dict[str, Any] = {}
    layer_spec = getattr(local_stack_spec().submodules, layer).submodules
    spec = layer_spec.self_attention
    for asked in (False, True):
        made = SimpleNamespace(qk_layernorm=asked, qk_l2_norm=False, **more)
        with contextlib.suppress(AttributeError):  # once Attention is made, of nothing
            build_module(spec, config=made, layer_number=1, pg_collection=GROUPS)
        parts = vars(seen["submodules"])
        norms = {name for name, part in parts.items() if part is SequenceParallelNorm}
        assert norms == (expected if asked else set())
    if layer == "mla_layer":
        names = layer_spec.sharded_state_dict_keys_map
        place = "self_attention.linear_kv_up_proj.layer_norm_"
        assert names["self_attention.kv_layernorm."] == place


GROUPS: Any = SimpleNamespace(pp=None, tp=None, cp=None)


def config(**changes: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    return TransformerConfig(**sizes, attention_dropout=0.0, **changes)


def empty_stack(spec: ModuleSpec, **changes: Any) -> Any:
    stage = {"layer_type_list": [], "pg_collection": GROUPS, **changes}
    return spec.module(config(), submodules=spec.submodules, **spec.params, **stage)


def test_the_last_norm_of_a_local_stack_is_torchs() -> None:
    spec = local_stack_spec()
    stack = empty_stack(spec)
    assert isinstance(stack, LocalHybridStack | HybridStack)
    assert isinstance(stack.final_norm, torch.nn.LayerNorm) and stack.post_layer_norm
    for without in ({"post_layer_norm": False}, {"post_process": False}):
        assert not hasattr(empty_stack(spec, **without), "final_norm")


def test_a_stage_without_attention_makes_the_contexts_too() -> None:
    shared = SharedState(BurstConfig())
    stack = empty_stack(burst_layer_spec(local_stack_spec(), shared))
    assert isinstance(stack, LocalHybridStack)
    assert len([*shared.contexts]) == 1


def test_latents_of_layers_that_megatron_fuses_are_ours_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For --mla-down-proj-fusion the stack writes Megatron's class over ours in a copy."""
    attached: list[Any] = []
    monkeypatch.setattr(latent_layers, "attach", attached.append)

    class Fusing(torch.nn.Module):
        def __init__(self, *_: Any, submodules: Any, **__: Any) -> None:
            super().__init__()
            fused = HybridStack._fuse_mla_down_proj(None, submodules)
            self.layer = object.__new__(fused.mla_layer.submodules.self_attention.module)
            torch.nn.Module.__init__(self.layer)
            self.layer.core_attention = SimpleNamespace(latents=None)

    spec = burst_layer_spec(local_stack_spec(), BurstConfig())
    spec.params["stack"] = Fusing
    stack = empty_stack(spec)
    assert attached == [stack.layer]
    latent_layers.attach_to_megatrons([stack])
    stack.layer.core_attention.latents = object()
    latent_layers.attach_to_megatrons([stack])
    assert attached == [stack.layer] * 2, "until it has them"


def test_layers_that_cannot_stand_beside_ours_are_refused() -> None:
    spec = burst_layer_spec(local_stack_spec(), BurstConfig())
    with pytest.raises(ValueError, match=r"D in the pattern \*-D: DeepSeek .*: take \+"):
        empty_stack(spec, layer_type_list=["*", "-", "D"])


def test_mtp_layers_of_a_gpt_have_our_attention_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    last = "megatron.core.parallel_state.is_pipeline_last_stage"
    monkeypatch.setattr(last, lambda **_: True)
    transformer = config(mtp_num_layers=2)
    stock = get_gpt_mtp_block_spec(
        transformer, get_gpt_layer_local_spec(), use_transformer_engine=False
    )
    shared = SharedState(BurstConfig(), layer_config=LayerConfig(check="nan"))
    wrapped = attach._with_burst_mtp(lambda config, spec, vp_stage: stock)
    ours, kept = (
        wrapped(SimpleNamespace(transformer_layer_spec=provider), None, vp_stage=None)
        for provider in (LayerSpecProvider(None, shared), None)
    )
    assert kept is stock
    for layer in ours.layer_specs:
        norms = layer.submodules.enorm, layer.submodules.hnorm, layer.submodules.layer_norm
        assert norms == (SequenceParallelNorm,) * 3
        attention = layer.submodules.mtp_model_layer.submodules.self_attention.submodules
        assert attention.core_attention.module is CoreAttentionByCommType

    model = torch.nn.Module()
    for place in ("decoder", "mtp"):
        layer = torch.nn.Module()
        layer.self_attention = torch.nn.Module()
        layer.self_attention.core_attention = build(shared=shared, layer_number=1)
        setattr(model, place, torch.nn.ModuleList([layer]))
    name_mtp_layers([model])
    q = torch.full((8, 1, 4, 8), torch.nan)
    for place, name in (("decoder", "layer 1, rank 0"), ("mtp", "layer mtp.0, rank 0")):
        with pytest.raises(RuntimeError, match=f"--burst-check nan: {name}"):
            getattr(model, place)[0].self_attention.core_attention(q, q, q, None)


def test_megatron_may_copy_a_stack_deeply() -> None:
    """It does so for --mla-down-proj-fusion; contexts hold process groups."""
    shared = SharedState(BurstConfig())
    copied = copy.deepcopy(burst_layer_spec(local_stack_spec(), shared))
    attention = copied.submodules.mla_layer.submodules.self_attention.submodules.core_attention
    assert attention.params["shared"] is shared
