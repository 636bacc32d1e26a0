"""Whether the gradient of the losses is what gradients made in forward were made for."""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDINGS = 4  # of a mask that is not 0 or 1, times a factor that is found by a division
_AT_A_TIME = 2**16  # tokens that are compared, so that no tensor is as long as the sequence


def expected_factor(grad: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor for which `grad` is `expected` times it, and whether it is one.

    Both [tokens] in the dtype of sums. All is computed on their device: the factor is a tensor
    without dimensions, the answer a boolean one. Where nothing is expected the factor is 0.
    """
    if not grad.numel():
        return grad.new_zeros(()), torch.ones((), dtype=torch.bool, device=grad.device)
    high, low = expected.max(0, keepdim=True), expected.min(0, keepdim=True)
    # Gathered, for indexing with it would ask the host.
    reference = torch.where(high.values >= -low.values, high.indices, low.indices)
    divisor = expected.gather(0, reference)[0]
    factor = torch.where(divisor == 0, 0.0, grad.gather(0, reference)[0] / divisor)
    matches = torch.ones((), dtype=torch.bool, device=grad.device)
    for some, wanted in zip(grad.split(_AT_A_TIME), expected.split(_AT_A_TIME), strict=True):
        found = wanted * factor
        allowed = ROUNDINGS * torch.finfo(grad.dtype).eps * found.abs()
        matches &= ((some - found).abs() <= allowed).all()
    return factor, matches


def read_later(answer: Tensor) -> Callable[[], bool]:
    """Start to bring `answer` to the host; the function returned waits for it and no longer.

    What is put on the device's queue in between runs while the host waits.
    """
    if answer.device.type != "cuda":
        return lambda: bool(answer)
    here = torch.empty_like(answer, device="cpu", pin_memory=True)
    here.copy_(answer, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> bool:
        arrived.synchronize()
        return bool(here)

    return read
