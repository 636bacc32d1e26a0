"""What the Ulysses degree is chosen by: the heads of Megatron's config, or why not. (fast tier)"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_burst import BurstConfig, BurstContext
from megatron_burst.plans.choice.cost import Shape

pytest.importorskip("megatron.core")
from megatron.core import ModelParallelConfig  # noqa: E402
from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)

from megatron_burst.plugin.attention.contexts import shape_of  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402


def model(**changes: Any) -> TransformerConfig:
    given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8} | changes
    make = MLATransformerConfig if "v_head_dim" in given else TransformerConfig
    return make(**given)


MLA = {"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
HALF = {"bf16": True, "params_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        ({}, {}, Shape(64, 8, 8, 8, 8, 4, 4, sends_raw=True)),
        (HALF, {}, Shape(64, 8, 8, 8, 8, 2, 4, sends_raw=True)),
        (HALF, {"grad_dtype": "model"}, Shape(64, 8, 8, 8, 8, 2, 2)),
        (
            {"num_query_groups": 2, "tensor_model_parallel_size": 2, "kv_channels": 16},
            {},
            Shape(64, 4, 1, 16, 16, 4, 4, sends_raw=True),
        ),
        (
            {"num_query_groups": 2, "tensor_model_parallel_size": 4},
            {},
            Shape(64, 2, 1, 8, 8, 4, 4, sends_raw=True),
        ),
        (MLA, {"mla": "heads"}, Shape(64, 8, 8, 24, 12, 4, 4, sends_raw=True)),
        (MLA, {}, "latents"),
        ({"window_size": (4, 0)}, {}, "window"),
        ({}, {"block_mask": "some.npy"}, "block mask"),
    ],
)
def test_the_shape_of_all_layers(
    changes: dict[str, Any], config: dict[str, Any], expected: Shape | str
) -> None:
    found = shape_of(model(**changes), BurstConfig(**config), 64)
    assert found == expected if isinstance(expected, Shape) else expected in str(found)


def test_of_no_transformer_nothing_is_known() -> None:
    assert "not known" in str(shape_of(ModelParallelConfig(), BurstConfig(), 64))
    assert "how many tokens" in str(shape_of(model(), BurstConfig())), "outside Megatron's parser"


def test_the_contexts_of_a_model_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    made = lambda settings, group, **more: given.append(more["shape"])  # noqa: E731
    monkeypatch.setattr(BurstContext, "create", made)
    shared = SharedState(BurstConfig(), 64)
    shared.contexts.of(model(num_query_groups=4), SimpleNamespace(cp=None))
    assert given == [Shape(64, 8, 4, 8, 8, 4, 4, sends_raw=True)]
