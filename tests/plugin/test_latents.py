"""Which layers' latents may be sent, and the norm that a fused up-projection has. (fast tier)"""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import BurstConfig
from megatron_burst.attention.context import BurstContext
from megatron_burst.config import Mla
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.schedules.topology import flat_grid
from megatron_burst.transport.comm import Communicator

pytest.importorskip("megatron.core")
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402

from megatron_burst.plugin.attention.core_attention import BurstCoreAttention  # noqa: E402
from megatron_burst.plugin.attention.latent_layers import _normalised, attach  # noqa: E402
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402


def up_projection(kind: type = ColumnParallelLinear, **more: Any) -> Any:
    linear: Any = object.__new__(kind)
    torch.nn.Module.__init__(linear)
    for name, value in {"gtp_remat_size": 1, **more}.items():
        setattr(linear, name, value)
    return linear


def layer(
    asked: str, linear: Any, *, checkpointed: bool = False, heads: int = 1, **more: Any
) -> Any:
    """As much of an MLASelfAttention as is looked at."""
    core = object.__new__(BurstCoreAttention)
    torch.nn.Module.__init__(core)
    config, alone = BurstConfig(mla=Mla(asked)), Communicator((), {}, 1.0)
    nodes = (0, 0) * heads
    groups = head_groups(nodes, heads)
    core.context = BurstContext(config, None, flat_grid(2), nodes, alone, groups)
    core.latents, core._shared = None, SharedState(config)
    return SimpleNamespace(
        core_attention=core,
        linear_kv_up_proj=linear,
        layer_number=3,
        checkpoint_core_attention=checkpointed,
        config=SimpleNamespace(sequence_parallel=False, **more),
        pg_collection=SimpleNamespace(tp=None),
    )


class OwnLinear(ColumnParallelLinear):
    pass


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "class": ({"linear": up_projection(OwnLinear)}, "OwnLinear, which is not known"),
    "FP8": ({"linear": up_projection(), "fp8": "hybrid"}, "fp8 = hybrid: .*drop --fp8-format"),
    "recipe": ({"linear": up_projection(), "quant_recipe": "r"}, "leave quant_recipe off"),
    "GTP": ({"linear": up_projection(gtp_remat_size=2)}, "over 2 GTP ranks"),
    "core_attn": ({"linear": up_projection(), "checkpointed": True}, "leave core_attn out"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_cannot_be_served_sends_heads_or_is_refused(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    about, reason = UNKNOWN[what]
    with pytest.raises(ValueError, match=f"layer 3 cannot run --burst-mla latent:\n.*{reason}"):
        attach(layer("latent", **about))
    auto = layer("auto", **about)
    with caplog.at_level(logging.INFO, "megatron_burst"):
        attach(auto)
        attach(auto)  # as the next layer
    (said,) = caplog.messages
    assert auto.core_attention.latents is None
    assert "K and V of all heads travel, not latents: " in said
    caplog.clear()
    attach(layer("heads", **about))
    assert not caplog.messages


@pytest.mark.parametrize(("asked", "takes"), [("auto", True), ("latent", True), ("heads", False)])
def test_a_known_layer_gives_its_latents(asked: str, takes: bool) -> None:
    known = layer(asked, up_projection())
    attach(known)
    assert (known.core_attention.latents is not None) == takes


def test_behind_an_all_to_all_a_layer_has_none_to_give() -> None:
    known = layer("auto", up_projection(), heads=2)
    attach(known)
    assert known.core_attention.latents is None


def rms(x: Tensor, gamma: Tensor, _: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * gamma


def mean_and_variance(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return rms(centred, gamma, beta) + beta


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("name", "slow"), [("RMSNorm", rms), ("LayerNorm", mean_and_variance)])
def test_a_fused_norm_is_applied(name: str, slow: Any, centred: bool) -> None:
    x, gamma, beta = torch.randn(5, 2, 8, dtype=torch.float64), *torch.randn(2, 8).double()
    linear = SimpleNamespace(
        layer_norm_weight=gamma - 1 if centred else gamma,
        layer_norm_bias=beta,
        zero_centered_gamma=centred,
        normalization=name,
        eps=1e-3,
    )
    torch.testing.assert_close(_normalised(x, linear), slow(x, gamma, beta))
    assert _normalised(x.bfloat16(), linear).dtype is torch.bfloat16
    assert _normalised(x, object()) is x
