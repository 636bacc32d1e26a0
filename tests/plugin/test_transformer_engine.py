"""Models of TransformerEngine's layers with our attention, and their checkpoints. (fast tier)

Skipped where TransformerEngine is not installed. Without a GPU scripts/build_transformer_engine.py
makes it importable: layers are built, saved and loaded, nothing is computed.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
}
# What of TransformerEngine's stays in each layer beside its linear layers with a norm in them.
THEIRS = {
    "qk_layernorm": {"TENorm"},
    "mla": {"TELinear"},
    "moe": {"TERowParallelLinear"},
    "moe_grouped": {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"},
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.plugin.te_models", json.dumps(MODELS)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", MODELS)
def test_every_layer_has_our_attention_among_their_modules(found: Any, model: str) -> None:
    assert found[model]["ours"] == LAYERS
    assert "TEDotProductAttention" not in found[model]["theirs"]
    assert THEIRS.get(model, {"TELayerNormColumnParallelLinear"}) <= set(found[model]["theirs"])


@pytest.mark.parametrize("model", MODELS)
def test_only_their_extra_state_is_not_in_our_plain_state(found: Any, model: str) -> None:
    attention = [f"decoder.layers.{i}.self_attention.core_attention" for i in range(LAYERS)]
    assert found[model]["only in stock"] == [f"{name}._extra_state" for name in attention]
    assert found[model]["only in ours"] == []


@pytest.mark.parametrize("model", MODELS)
def test_distributed_checkpoints_have_the_same_shards(found: Any, model: str) -> None:
    assert found[model]["shards that differ"] == []


@pytest.mark.parametrize("model", MODELS)
def test_checkpoints_load_strictly_from_theirs_and_back(found: Any, model: str) -> None:
    assert [found[model][copy] for copy in COPIES] == [""] * len(COPIES)
