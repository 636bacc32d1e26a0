"""The examples of docs/launching.md. (fast tier)"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402

from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_are_all_tried() -> None:
    assert [set(re.findall(r"^def (\w+)", text, re.M)) for text in EXAMPLES] == [
        {"gpt"},
        {"add_burst"},
        {"use_burst"},
    ]


def test_the_example_of_a_spec_has_our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = get_gpt_layer_local_spec()
    monkeypatch.setattr(
        "megatron.training.models.gpt.default_layer_spec", lambda config, stage: layer
    )
    names: dict[str, Any] = {}
    exec(EXAMPLES[0], names)
    attention = names["gpt"](SimpleNamespace()).submodules.self_attention.submodules.core_attention
    assert attention.module is CoreAttentionByCommType
    assert attention.params["shared"].config.backward == "kv"


def test_the_example_of_hooks_makes_them_for_one_pool() -> None:
    names: dict[str, Any] = {}
    exec(EXAMPLES[1], names)
    model_config = SimpleNamespace(pre_wrap_hooks=[], transformer_layer_spec=None)
    names["add_burst"](model_config)
    assert len(model_config.pre_wrap_hooks) == 3
    shared = model_config.transformer_layer_spec.shared
    assert shared.config.layout == "segmented-zigzag" and shared.checkpoints is not None
