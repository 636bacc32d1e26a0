"""What --spec megatron_burst.plugin.spec gpt takes from Megatron's arguments. (fast tier)

tests/training trains with it.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.training.models.gpt")
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_block import HybridStack  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_burst.plugin import spec  # noqa: E402
from megatron_burst.plugin.attention.attention_choice import CoreAttentionByCommType  # noqa: E402
from megatron_burst.plugin.attention.core_attention import SharedState  # noqa: E402
from megatron_burst.plugin.layer_spec import LayerSpecProvider  # noqa: E402


def arguments(**changes: Any) -> SimpleNamespace:
    found = {
        "cp_comm_type": ["burst"],
        "context_parallel_size": 1,
        "num_layers": 2,
        "distributed_timeout_minutes": 3,
        "attention_dropout": 0.0,
        "create_attention_mask_in_dataloader": False,
        "dataloader_inter_document_masking": False,
        "micro_batch_size": 2,
        "seq_length": 64,
    }
    return SimpleNamespace(**found | changes)


def test_the_first_algorithm_named_is_the_configurations_and_the_time_limit_is_megatrons() -> None:
    config = spec.config_from_args(arguments(cp_comm_type=["ulysses", "burst"]))
    assert config.algorithm == "ulysses" and config.timeout_seconds == 180


def test_the_hybrid_stack_is_built_beside_our_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    take = lambda self, *_: made.append(self.config.algorithm)  # noqa: E731
    monkeypatch.setattr(spec, "get_args", lambda: arguments(cp_comm_type=["ring"]))
    monkeypatch.setattr(SharedState, "get_megatrons", take)
    stack = spec.hybrid.module(
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4),
        layer_type_list=[],
        pg_collection=SimpleNamespace(pp=None, tp=None),
        post_process=False,
    )
    assert isinstance(stack, HybridStack) and made == ["ring"]


def test_virtual_stages_share_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "get_args", arguments)
    monkeypatch.setattr(LayerSpecProvider, "__call__", lambda self, config, stage: (self, stage))
    model_config = SimpleNamespace(transformer_layer_spec=spec.gpt)
    provider, stage = spec.gpt(model_config, 1)
    assert stage == 1 and model_config.transformer_layer_spec is provider
    assert provider.shared.tokens == 128, "by which heads are shared out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_comm_type": ["p2p"]}, "--cp-comm-type: add --cp-comm-type burst .*: burst, ring"),
        ({"cp_comm_type": ["burst", "ring", "burst"]}, "has 3 names for the 2 layers"),
        ({"attention_dropout": 0.1}, "pass --attention-dropout 0"),
        (
            {"create_attention_mask_in_dataloader": True},
            "pass --no-create-attention-mask-in-dataloader",
        ),
        (
            {
                "dataloader_inter_document_masking": True,
                "sequence_parallel": False,
                "tensor_model_parallel_size": 1,
                "moe_router_load_balancing_type": "none",
                "num_experts": None,
            },
            "documents need hooks of the model: start with python -m megatron_burst.run",
        ),
        ({"mtp_num_layers": 1}, "MTP layers from a spec of its own: start with python -m"),
        ({"hybrid_layer_pattern": "*D"}, r"D in the pattern \*D"),
    ],
)
def test_what_it_cannot_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.config_from_args(arguments(**changes))


PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_are_all_tried() -> None:
    assert [set(re.findall(r"^def (\w+)", text, re.M)) for text in EXAMPLES] == [
        {"gpt"},
        {"add_burst"},
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
