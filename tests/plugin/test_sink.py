"""Sinks and unequal head sizes in our core attention, built and saved by Megatron. (fast tier)"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import oracle

pytest.importorskip("megatron.core")
from megatron.core.extensions.transformer_engine import TEDotProductAttention  # noqa: E402
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402

from tests.plugin.contexts import group_of  # noqa: E402
from tests.plugin.test_layer_spec import build as build_layer  # noqa: E402


def build(
    softmax_type: str,
    tp_rank: int = 0,
    tp_size: int = 1,
    stood_there: type = DotProductAttention,
    **settings: Any,
) -> Any:
    return build_layer(
        config={"softmax_type": softmax_type, **settings},
        fallback=stood_there,
        k_channels=6,
        v_channels=5,
        pg_collection=SimpleNamespace(cp=None, tp=group_of(tp_size, tp_rank)),
    )


def test_only_learnable_sinks_are_parameters_and_saved() -> None:
    for softmax_type in ("vanilla", "off-by-one"):
        module = build(softmax_type)
        assert not list(module.parameters()) and not module.state_dict()
        assert not module.sharded_state_dict(metadata={"dp_cp_group": group_of(1)})
    module = build("learnable", params_dtype=torch.bfloat16)
    ((name, parameter),) = module.named_parameters()
    assert (name, parameter.shape, parameter.dtype) == ("softmax_offset", (4,), torch.bfloat16)
    assert list(module.state_dict()) == ["softmax_offset"]


def test_the_parameter_is_drawn_by_megatrons_initialisation() -> None:
    module = build("learnable", init_method=lambda x: torch.nn.init.constant_(x, 7.0))
    assert module.softmax_offset.eq(7.0).all()
    other = build("learnable", init_method=torch.nn.init.zeros_, perform_initialization=False)
    assert isinstance(other.softmax_offset, torch.nn.Parameter)


@pytest.mark.parametrize("rank", [0, 1])
def test_mc7452_sink_gradients_of_every_tensor_parallel_rank_are_in_the_norm(rank: int) -> None:
    module = build("learnable", tp_rank=rank, tp_size=2)
    assert module.softmax_offset.shape == (2,)
    assert param_is_not_tensor_parallel_duplicate(module.softmax_offset, group_of(2, rank))
    assert module.softmax_offset.partition_dim == 0


def test_checkpoints_hold_a_shard_of_each_tensor_parallel_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = build("learnable", tp_rank=1, tp_size=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    metadata = {"dp_cp_group": group_of(1)}
    state = module.sharded_state_dict("core_attention.", metadata=metadata)
    ((name, shard),) = state.items()
    assert name == shard.key == "core_attention.softmax_offset"
    assert (shard.global_shape, shard.local_shape, shard.global_offset) == ((4,), (2,), (2,))
    assert shard.data is module.softmax_offset


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_an_extra_state_in_a_checkpoint_is_read_over(softmax_type: str) -> None:
    """TransformerEngine writes one a layer: test_transformer_engine.py has the real one."""
    module = torch.nn.ModuleDict({"core_attention": build(softmax_type)})
    extra = {"core_attention._extra_state": torch.empty(0, dtype=torch.uint8)}
    module.load_state_dict({**module.state_dict(), **extra}, strict=True)


def test_an_extra_state_is_saved_beside_a_sink_where_transformer_engines_attention_stood() -> None:
    module = build("learnable", stood_there=TEDotProductAttention)
    assert list(module.state_dict()) == ["softmax_offset"]
    metadata = {"dp_cp_group": group_of(1)}
    state = module.sharded_state_dict("core_attention.", metadata=metadata)
    assert list(state) == ["core_attention.softmax_offset", "core_attention._extra_state"]
    assert state["core_attention._extra_state"].data.numel() == 0
    without_sink = build("vanilla", stood_there=TEDotProductAttention)
    assert not without_sink.sharded_state_dict(metadata=metadata)


def inputs(tokens: int = 6) -> tuple[Tensor, ...]:
    """Query, key, value and the output's gradient, with another head size of values."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(tokens, 2, 4, size, generator=generator) for size in (6, 6, 5, 5))


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_it_equals_dense_attention_with_one_more_key(softmax_type: str) -> None:
    module = build(softmax_type, init_method=lambda x: x.data.copy_(torch.tensor([3, -2, 0, 1.0])))
    *qkv, dout = inputs()
    q, k, v = (x.requires_grad_() for x in qkv)
    out = module(q, k, v, None)
    assert out.shape == (6, 2, 4 * 5)
    out.backward(dout.flatten(2))
    whole = [x.transpose(0, 1) for x in (q, k, v, dout)]
    expected = oracle.attention(
        *whole, oracle.visible_pairs(6, causal=True), sink=module.softmax_offset
    )
    found = [out.unflatten(2, (4, 5)), q.grad, k.grad, v.grad]
    wanted = [expected.out, expected.dq, expected.dk, expected.dv]
    for x, y in itertools.zip_longest(found, wanted):
        assert oracle.relative_error(x.transpose(0, 1), y) < 3e-6
    if softmax_type == "learnable":
        assert oracle.relative_error(module.softmax_offset.grad, expected.dsink) < 3e-6
