"""The chunked loss: numbers, memory and time beside all logits at once."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_burst.kernels.dtypes import accumulation_dtype
from megatron_burst.loss.function import linear_cross_entropy
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_most, relative_error
from megatron_burst.tools.one_rank import drawing

REMEDY = "train with --lm-head-loss megatron"
_ERROR = 1e-2  # of the norm, in bfloat16
_SLOWER = 1.25  # than all logits at once: backward makes the logits again
_TOKEN_BYTES = 32  # that a token may take beside the limit

type _Tensors = tuple[Tensor, Tensor, Tensor]  # hidden states, weight, targets
type _Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def check(device: Device) -> Iterator[Check]:
    """Compare losses and gradients with float64, and cost with `F.cross_entropy`."""
    yield from _numbers(device)
    shape = (8192, 131072, 4096) if device.is_gpu else (256, 2048, 32)
    limit = 6144 if device.is_gpu else 1
    tensors = draw_inputs(device.device, DTYPE, *shape)
    chunked = partial(linear_cross_entropy, memory_mb=limit)
    once = partial(chunked, reduction="mean")
    costs = [_cost(device, way, tensors) for way in (chunked, all_logits, once)]
    seconds, peaks = zip(*costs, strict=True)
    allowed = limit + _TOKEN_BYTES * shape[0] / 2**20
    gradients = sum(x.nbytes for x in tensors[:2]) / 2**20
    said = f" MiB, {peaks[1] / 2**20:.0f} with all logits"
    yield at_most("memory", peaks[0] / 2**20 - gradients, allowed, "{:.0f}", more=said)
    yield at_most("memory with logits made once", peaks[2] / 2**20 - gradients, allowed, "{:.0f}")
    yield device.judged(at_most("time over that of all logits", seconds[0] / seconds[1], _SLOWER))
    yield device.judged(at_most("time with logits made once", seconds[2] / seconds[0], 1.0))
    yield Check("forward and backward", ", ".join(f"{each * 1e3:.1f} ms" for each in seconds))


def _numbers(device: Device) -> Iterator[Check]:
    shape = (512, 4096, 256) if device.is_gpu else (64, 256, 32)
    hidden, weight, targets = draw_inputs(device.device, DTYPE, *shape)
    targets[1::7] = -100  # neither the first nor the last
    exact, wide = (x.detach().double().requires_grad_() for x in (hidden, weight))
    for how, more in {"none": "", "mean": ", of logits made once"}.items():
        chunked = partial(linear_cross_entropy, chunk_size=48, reduction=how)
        actual = _losses_and_gradients(chunked, hidden, weight, targets)
        at_once = partial(all_logits, reduction=how)
        right = _losses_and_gradients(at_once, exact, wide, targets)
        for name, *both in zip(("losses", "dhidden", "dweight"), actual, right, strict=True):
            yield at_most(f"error of {name}{more}", relative_error(*both), _ERROR)


def all_logits(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the loss of all logits at once, in float32 or better."""
    logits = F.linear(hidden, weight)
    logits = logits.to(accumulation_dtype(logits.dtype))
    return F.cross_entropy(logits, targets, reduction=reduction)


def _losses_and_gradients(
    way: _Way, hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    loss = way(hidden, weight, targets)
    scale = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=loss.dtype)
    scale = scale.view(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight), scale)


def draw_inputs(
    device: str | torch.device, dtype: torch.dtype, tokens: int, vocabulary: int, dim: int
) -> _Tensors:
    """Draw states and a weight whose logits have a standard deviation of 2, and targets."""
    draw = drawing(device, torch.float32)
    hidden, weight = draw(tokens, dim), draw(vocabulary, dim) * 2 / dim**0.5
    targets = torch.arange(tokens, device=device) * 7919 % vocabulary
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _cost(device: Device, way: _Way, tensors: _Tensors) -> tuple[float, int]:
    """Return the seconds and the peak of a forward and a backward."""

    def both() -> None:
        way(*tensors).mean().backward()
        tensors[0].grad = tensors[1].grad = None

    return device.seconds(both, 3), device.peak(both, tensors)
