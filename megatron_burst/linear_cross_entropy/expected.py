"""Whether the gradient of the losses is what gradients made in forward were made for."""

from collections.abc import Callable

import torch
from torch import Tensor

ROUNDINGS = 4  # of a mask that is not 0 or 1, times a factor that is found by a division


def expected_factor(grad: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor for which `grad` is `expected` times it, and whether it is one.

    Both [tokens] in the dtype of sums. All is computed on their device: the factor is a tensor
    without dimensions, the answer a boolean one. Where nothing is expected the factor is 0.
    """
    if not grad.numel():
        return grad.new_zeros(()), torch.ones((), dtype=torch.bool, device=grad.device)
    reference = expected.abs().argmax(0, keepdim=True)  # indexing with it would ask the host
    divisor = expected.gather(0, reference)[0]
    factor = torch.where(divisor == 0, 0.0, grad.gather(0, reference)[0] / divisor)
    found = expected * factor
    allowed = ROUNDINGS * torch.finfo(grad.dtype).eps * found.abs()
    return factor, ((grad - found).abs() <= allowed).all()


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
