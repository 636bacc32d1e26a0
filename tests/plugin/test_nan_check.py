"""--burst-check nan names where numbers stop being finite; off it is not there. (fast tier)

Which rank it names in a training of two: training/test_failures.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")
from megatron_burst import BurstConfig, BurstContext, Mask, ring_attention  # noqa: E402
from megatron_burst.attention.kv import Latents  # noqa: E402
from megatron_burst.plugin.attention.nan_check import (  # noqa: E402
    CAME_BACK,
    CAME_IN,
    MADE,
    NonFiniteError,
    with_nan_check,
)
from megatron_burst.plugin.attention.shared_state import SharedState  # noqa: E402
from megatron_burst.plugin.training_config import LayerConfig  # noqa: E402
from tests.plugin.test_layer_spec import build  # noqa: E402

HUGE = 1e30  # finite, and its square is not
attend = with_nan_check(ring_attention, "7")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (1, 8, 4, 8), "k": (1, 8, 2, 8), "v": (1, 8, 2, 8), "sink": (4,)}
    return {
        name: torch.randn(shape, generator=generator, requires_grad=True)
        for name, shape in shapes.items()
    }


def call(attention: Callable[..., Tensor], x: dict[str, Tensor]) -> Tensor:
    context = BurstContext.create(BurstConfig(), None)
    more = {"mask": Mask.causal(), "sink": x["sink"]}
    return attention(x["q"], x["k"], x["v"], context, **more)


def planted(x: Tensor, value: float) -> Tensor:
    changed = x.detach().clone()
    changed.view(-1)[3] = value
    return changed.requires_grad_()


def check(error: pytest.ExceptionInfo[NonFiniteError], *parts: str) -> None:
    rank = "rank 0 (context-parallel rank 0 of 1)"
    for part in ("--burst-check nan: layer 7", rank, *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "sink"])
def test_an_input_is_named(name: str, value: float) -> None:
    x = tensors()
    x[name] = planted(x[name], value)
    with pytest.raises(NonFiniteError) as error:
        call(attend, x)
    counts = "1 NaN and 0 Inf" if value != value else "0 NaN and 1 Inf"
    index = (*[0] * (x[name].ndim - 1), 3)
    check(error, f"forward: {'the sink' if name == 'sink' else name} has {counts}", CAME_IN)
    check(error, f"among {x[name].numel()} numbers", f"the first at {list(index)}")


def test_an_output_that_attention_made_is_named() -> None:
    x = tensors()
    x |= {name: planted(x[name], HUGE) for name in ("q", "k")}
    with pytest.raises(NonFiniteError) as error:
        call(attend, x)
    check(error, "forward: the output has", MADE)


def test_a_gradient_that_came_back_is_named() -> None:
    out = call(attend, tensors())
    with pytest.raises(NonFiniteError) as error:
        out.backward(planted(out, float("nan")).detach())
    check(error, "backward: the gradient of the output has 1 NaN", CAME_BACK)


def test_a_gradient_that_attention_made_is_named() -> None:
    x = tensors()
    x["v"] = planted(x["v"], HUGE)
    out = call(attend, x)
    with pytest.raises(NonFiniteError) as error:
        out.backward(torch.full_like(out, HUGE))
    check(error, "backward: the gradient of ", MADE)


def test_what_other_ranks_made_of_a_latent_is_named() -> None:
    def attention(q: Tensor, *_: object, latents: Latents, **__: object) -> Tensor:
        return q + (latents.latent - latents.latent.detach()).sqrt().sum()  # its slope is infinite

    def made_of(q: Tensor, k: Tensor, v: Tensor, context: BurstContext, **more: Any) -> Tensor:
        latents = Latents(torch.ones(1, 8, 3, requires_grad=True), torch.ones(24, 3))
        return with_nan_check(attention, "7")(q, k, v, context, latents=latents, **more)

    out = call(made_of, tensors())
    with pytest.raises(NonFiniteError) as error:
        out.sum().backward()
    check(error, "backward: the gradient of the latent has 0 NaN and 24 Inf", MADE)


def test_it_changes_no_bit_and_leaves_no_hook() -> None:
    results = []
    for attention in (attend, ring_attention):
        x = tensors()
        out = call(attention, x)
        out.sum().backward()
        results.append([out, *(t.grad for t in x.values())])
        assert not any(t._backward_hooks for t in x.values())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tensors_without_gradients_are_looked_at_in_forward() -> None:
    x = {name: t.detach() for name, t in tensors().items()}
    call(attend, x)
    with pytest.raises(NonFiniteError):
        call(attend, x | {"k": x["k"] * float("nan")})


@pytest.mark.parametrize("wanted", [False, True])
def test_the_flag_decides_what_a_layer_calls(wanted: bool) -> None:
    shared = SharedState(BurstConfig(), layer_config=LayerConfig(check="nan" if wanted else "off"))
    module = build(shared=shared, layer_number=7)
    assert (module._attend is ring_attention) == (not wanted)
    q, k, v = (torch.randn(8, 1, 4, 8) for _ in range(3))
    module(q, k, v, None)
    if wanted:
        with pytest.raises(NonFiniteError, match="layer 7"):
            module(q * float("nan"), k, v, None)
