"""Models of TransformerEngine's layers with our attention, and their checkpoints. (fast tier)

Skipped where TransformerEngine is not installed. Without a GPU scripts/build_transformer_engine.py
makes it importable: layers are built, saved and loaded, nothing is computed.
"""

import importlib.util
import inspect
import json
from typing import Any

import pytest

from tests.processes import python

LAYERS = 2
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
MOE = {"num_moe_experts": 4, "add_bias_linear": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk_layernorm": {"qk_layernorm": True},
    "mla": {"multi_latent_attention": True, "qk_layernorm": True, "v_head_dim": 8, **LATENT},
    "moe": {**MOE, "moe_grouped_gemm": False},
    "moe_grouped": {**MOE, "moe_grouped_gemm": True},
    "sink": {"softmax_type": "learnable"},
    "off_by_one": {"softmax_type": "off-by-one"},
    "hybrid": {"pattern": "*-**"},
    "hybrid_moe_mtp": {**MOE, "pattern": "E*/E*", "moe_grouped_gemm": True, "mtp_num_layers": 1},
}
# Where a hybrid has attention; all layers of the others have it.
PLACES = {"hybrid": (0, 2, 3), "hybrid_moe_mtp": (1,)}
# A module of a layer by which the model is what it is called.
THEIRS = {
    "dense": ("mlp.linear_fc1", "TELayerNormColumnParallelLinear"),
    "qk_layernorm": ("self_attention.q_layernorm", "LayerNorm"),
    "mla": ("self_attention.linear_kv_up_proj", "TELayerNormColumnParallelLinear"),
    "moe": ("mlp.experts.local_experts.3.linear_fc1", "TEColumnParallelLinear"),
    "moe_grouped": ("mlp.experts.linear_fc1", "TEColumnParallelGroupedLinear"),
    "hybrid": ("self_attention.linear_qkv", "TELayerNormColumnParallelLinear"),
    "hybrid_moe_mtp": ("self_attention.linear_qkv", "TELayerNormColumnParallelLinear"),
}
COPIES = [
    f"{kind}, {copy}"
    for kind in ("plain", "distributed")
    for copy in ("ours from stock", "stock from ours")
]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    for name in ("megatron.core", "transformer_engine", "transformer_engine_torch"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; scripts/build_transformer_engine.py builds it")
    # Not by -m: to save a checkpoint Megatron starts a process, which would import it all again.
    code = "from tests.plugin.te_models import main; main()"
    done = python("-W", "ignore", "-c", code, json.dumps(MODELS), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", MODELS)
def test_core_attention_of_a_layer_is_ours_and_all_else_is_theirs(found: Any, model: str) -> None:
    stock, ours = found[model]["stock"], found[model]["ours"]
    name, kind = THEIRS.get(model, THEIRS["dense"])
    assert ours[name] == kind
    attention = "self_attention.core_attention"
    assert stock[attention] == "TEDotProductAttention"
    assert ours == {**stock, attention: "BurstCoreAttention"}


@pytest.mark.parametrize("model", MODELS)
def test_only_their_extra_state_is_not_in_our_plain_state(found: Any, model: str) -> None:
    layers = [f"decoder.layers.{i}" for i in PLACES.get(model, range(LAYERS))]
    layers += ["mtp.layers.0.mtp_model_layer.layers.1"] * ("mtp" in model)
    attention = [f"{layer}.self_attention.core_attention" for layer in layers]
    assert found[model]["only in stock"] == [f"{name}._extra_state" for name in attention]
    assert found[model]["only in ours"] == []


@pytest.mark.parametrize("model", MODELS)
def test_distributed_checkpoints_have_the_same_shards(found: Any, model: str) -> None:
    assert found[model]["shards that differ"] == []


def test_a_stack_of_local_layers_has_the_checkpoints_of_theirs(found: Any) -> None:
    assert found["hybrid"]["keys that differ"] == []


@pytest.mark.parametrize("model", MODELS)
def test_checkpoints_load_strictly_from_theirs_and_back(found: Any, model: str) -> None:
    assert [found[model][copy] for copy in COPIES] == [""] * len(COPIES)


def test_their_fused_product_takes_what_the_loss_gives() -> None:
    cpp_extensions = pytest.importorskip("transformer_engine.pytorch.cpp_extensions")
    names = inspect.signature(cpp_extensions.general_gemm).parameters.keys()
    assert names >= {"A", "B", "out_dtype", "layout", "out", "accumulate", "grad"}
    assert "workspace" not in names, "by that plugin/hooks/main_grad.py tells versions apart"
