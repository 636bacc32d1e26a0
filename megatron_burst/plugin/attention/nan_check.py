"""Names the layer, rank, pass and tensor in which attention's numbers stop being finite."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention.context import BurstContext
from megatron_burst.attention.kv import Latents

CAME_IN = "attention was given it: look at what comes before this layer"
CAME_BACK = "attention was given it: look at what follows this layer"
MADE = "attention made it from finite numbers, its own and those that other ranks sent"


class NonFiniteError(RuntimeError):
    """A tensor of attention holds a NaN or an Inf; the message names layer, rank and tensor."""


def with_nan_check(attend: Callable[..., Tensor], layer: str) -> Callable[..., Tensor]:
    """Return `attend`, a `ring_attention`, that raises at the first tensor with a NaN or an Inf.

    Looked at in this order: q, k, v, the sink and the latent, the output; and in backward its
    gradient, then those of the others: a latent's is what other ranks made of theirs. What a rank
    is given is looked at before it goes to other ranks, so the rank that raises is the one where it
    began. Every look waits for the device.

    Raises:
        NonFiniteError: from the call or, in backward, from autograd.
    """

    @functools.wraps(attend)
    def checked(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: BurstContext,
        *,
        sink: Tensor | None = None,
        latents: Latents | None = None,
        **more: Any,
    ) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        place = (
            f"layer {layer}, rank {rank} (context-parallel rank {context.rank} of {context.ranks})"
        )
        given = {"q": q, "k": k, "v": v} | ({} if sink is None else {"the sink": sink})
        given |= {} if latents is None else {"the latent": latents.latent}
        for name, x in given.items():
            _look(name, x, f"{place}, forward", CAME_IN)
        # Views of our own: a hook on a parameter would stay there.
        given = {name: x.view_as(x) for name, x in given.items()}
        if latents is not None:
            latents = replace(latents, latent=given["the latent"])
        more |= {"sink": given.get("the sink"), "latents": latents}
        out = attend(*(given[name] for name in "qkv"), context, **more)
        _look("the output", out, f"{place}, forward", MADE)
        _look_in_backward("the output", out, place, CAME_BACK)
        for name, x in given.items():
            _look_in_backward(name, x, place, MADE)
        return out

    return checked


def _look_in_backward(name: str, tensor: Tensor, place: str, origin: str) -> None:
    if tensor.requires_grad:
        about = f"the gradient of {name}"
        tensor.register_hook(lambda grad: _look(about, grad, f"{place}, backward", origin))


def _look(name: str, tensor: Tensor, place: str, origin: str) -> None:
    finite = torch.isfinite(tensor)
    if not finite.all():
        raise NonFiniteError(
            f"--burst-check nan: {place}: {name} has {int(tensor.isnan().sum())} NaN and "
            f"{int(tensor.isinf().sum())} Inf among {tensor.numel()} numbers of shape "
            f"{list(tensor.shape)}, the first at {(~finite).nonzero()[0].tolist()}; {origin}"
        )
