"""Under torch.autocast a call is that of tensors cast by hand, backward too. (fast tier)"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_burst import (
    BurstConfig,
    Mask,
    latent_ring_attention,
    linear_cross_entropy,
    ring_attention,
)
from megatron_burst.kernels.dtypes import without_autocast
from tests.workers import Team, WorkerPool

B = 2, 8  # batch and tokens of a rank
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "attention": [(*B, 4, 6), (*B, 2, 6), (*B, 2, 6)],
    "latents": [(*B, 4, 8), (*B, 7), (*B, 3), (4 * (5 + 6), 7)],
    "loss": [(*B, 12), (20, 12)],
}


def results(team: Team, name: str, how: str) -> list[Tensor]:
    """The result and all gradients; `how` says what is under autocast, or cast by hand.

    A loss whose tensors are all float32 stays so: loss/test_one_rank.py.
    """
    torch.manual_seed(0)
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES[name]]
    given: Any = (torch.arange(16).view(B),)
    call: Any = partial(linear_cross_entropy, z_loss=0.1)
    if name != "loss":
        given = (team.context(BurstConfig(mla="latent" if name == "latents" else "auto")),)
        function: Any = latent_ring_attention if name == "latents" else ring_attention
        call = partial(function, mask=Mask.causal())
    with torch.autocast("cpu", torch.bfloat16, enabled=how != "by hand"):
        # As layers make them: products are narrow, what comes out of a norm or is added is not.
        tensors = [x if how == "all" or n % 2 else x.bfloat16() for n, x in enumerate(leaves)]
        tensors = [x.bfloat16() for x in leaves] if how == "by hand" else tensors
        out = call(*tensors, *given)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "all"):
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
    return [out.detach(), *gradients]


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_is_that_of_narrow_tensors(workers: WorkerPool, name: str) -> None:
    expected = workers.run(2, results, name, "by hand")
    assert expected[0][0].dtype == (torch.float32 if name == "loss" else torch.bfloat16)
    for how in ("all", "forward") if name != "loss" else ("forward",):
        for found, right in zip(workers.run(2, results, name, how), expected, strict=True):
            pairs = list(zip(found, right, strict=True))
            assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in pairs), how


def test_passes_compute_in_the_dtypes_of_their_tensors() -> None:
    """Autocast changes products of some kernels; none of those above."""
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(x, x).dtype == torch.bfloat16
        assert without_autocast(torch.mm)(x, x).dtype == torch.float32
