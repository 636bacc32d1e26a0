"""Names the layer, rank, pass and tensor in which attention's numbers stop being finite."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_burst.attention.context import BurstContext

CAME_IN = "attention was given it: look at what comes before this layer"
CAME_BACK = "attention was given it: look at what follows this layer"
MADE = "attention made it from finite numbers, its own and those that other ranks sent"


class NonFiniteError(RuntimeError):
    """A tensor of attention holds a NaN or an Inf; the message names layer, rank and tensor."""


def with_nan_check(attend: Callable[..., Tensor], layer_number: int) -> Callable[..., Tensor]:
    """Return `attend`, a `ring_attention`, that raises at the first tensor with a NaN or an Inf.

    Looked at in this order: q, k, v and the sink, the output; and in backward its gradient, then
    those of q, k, v and the sink. What a rank is given is looked at before it goes to other ranks,
    so the rank that raises is the one where it began. Every look waits for the device.

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
        **more: Any,
    ) -> Tensor:
        place = f"layer {layer_number}, {_rank(context)}"
        given = {"q": q, "k": k, "v": v} | ({} if sink is None else {"the sink": sink})
        _look(given, f"{place}, forward", CAME_IN)
        # Views of our own: a hook on a parameter would stay there.
        given = {name: x.view_as(x) for name, x in given.items()}
        out = attend(*(given[name] for name in "qkv"), context, sink=given.get("the sink"), **more)
        _look({"the output": out}, f"{place}, forward", MADE)
        _look_in_backward({"the output": out}, f"{place}, backward", CAME_BACK)
        _look_in_backward(given, f"{place}, backward", MADE)
        return out

    return checked


def _look_in_backward(tensors: Mapping[str, Tensor], place: str, origin: str) -> None:
    def look(name: str, gradient: Tensor) -> None:
        _look({f"the gradient of {name}": gradient}, place, origin)

    for name, tensor in tensors.items():
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(look, name))


def _look(tensors: Mapping[str, Tensor], place: str, origin: str) -> None:
    for name, tensor in tensors.items():
        finite = torch.isfinite(tensor)
        if finite.all():
            continue
        first = (~finite).nonzero()[0].tolist()
        raise NonFiniteError(
            f"--burst-check-nan: {place}: {name} has {int(tensor.isnan().sum())} NaN and "
            f"{int(tensor.isinf().sum())} Inf among {tensor.numel()} numbers of shape "
            f"{list(tensor.shape)}, the first at {first}; {origin}"
        )


def _rank(context: BurstContext) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank} (context-parallel rank {context.rank} of {context.ranks})"
