"""What the prediction at the start of a training counts with, from Megatron's settings. (fast tier)

tests/training reads it in the log.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_burst.plans.cost import Shape

pytest.importorskip("megatron.training.models.gpt")
from megatron_burst.plugin.hooks.recompute_log import (  # noqa: E402
    _checkpointed,
    _micro_batches,
    _shape,
)


def settings(**changes: Any) -> Any:
    found = {
        "tensor_model_parallel_size": 2,
        "num_attention_heads": 16,
        "num_query_groups": 4,
        "kv_channels": 64,
        "multi_latent_attention": False,
        "params_dtype": torch.bfloat16,
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return SimpleNamespace(**found | changes)


def context(head_parallel_size: int) -> Any:
    return SimpleNamespace(heads=SimpleNamespace(size=head_parallel_size))


@pytest.mark.parametrize(
    ("changes", "head_parallel_size", "expected"),
    [
        ({}, 1, Shape(100, 8, 2, 64, 64, 2, 4)),
        ({}, 2, Shape(200, 4, 1, 64, 64, 2, 4)),
        ({}, 4, Shape(400, 2, 1, 64, 64, 2, 4)),  # kv heads are copied
        ({"num_query_groups": 1}, 1, Shape(100, 8, 1, 64, 64, 2, 4)),  # one for each TP rank
        (
            {
                "multi_latent_attention": True,
                "qk_head_dim": 32,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 24,
                "params_dtype": torch.float32,
            },
            1,
            Shape(100, 8, 8, 40, 24, 4, 4),
        ),
    ],
)
def test_the_shape_of_a_rank(
    changes: dict[str, Any], head_parallel_size: int, expected: Shape
) -> None:
    assert _shape(settings(**changes), context(head_parallel_size), 100) == expected


def test_the_layers_that_megatron_checkpoints() -> None:
    assert _checkpointed(settings(recompute_num_layers=2), 6) == 6
    block = settings(recompute_method="block", recompute_num_layers=2)
    assert [_checkpointed(block, layers) for layers in (1, 6)] == [1, 2]
    assert _checkpointed(settings(recompute_method=None, recompute_num_layers=None), 6) == 6


def test_the_micro_batches_of_a_step() -> None:
    sizes = {"global_batch_size": 24, "micro_batch_size": 2, "data_parallel_size": 3}
    assert _micro_batches(SimpleNamespace(**sizes)) == 4
