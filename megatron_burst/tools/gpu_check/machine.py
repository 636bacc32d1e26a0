"""The kernels that serve this machine, why others do not, and what first calls cost."""

from collections.abc import Iterator

from megatron_burst.kernels import Kernel, Request
from megatron_burst.tools.doctor.attention import served
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_most
from megatron_burst.tools.one_rank import OneCall, Sizes

REMEDY = "install another kernel (docs/install.md)"
_LONGEST_FIRST_CALL = 60.0  # seconds, forward and backward: what compiles longer is no default


def check(device: Device) -> Iterator[Check]:
    """Say what is here; fail where no kernel serves or one cannot make its first call."""
    taken = ""
    for answer in served(Request(device.device, DTYPE, 8, 2, 128, 128)):
        taken = answer.kernel if answer.is_taken else taken
        state = "taken" if answer.is_taken else "; ".join(answer.reasons) or "serves"
        yield Check(f"kernel {answer.kernel}", state)
    yield Check("kernel that auto takes", taken or "none", "one", bool(taken))
    for name, kernel in device.kernels(8, 2, 128).items():
        yield from device.guarded(_first_call(device, name, kernel), f"first call of {name}: ")


def _first_call(device: Device, name: str, kernel: Kernel) -> Iterator[Check]:
    tokens = 896 if device.is_gpu else 64  # a shape that no other stage has
    one = OneCall(kernel, Sizes(tokens, 8, 2, 128).draw(device.device, DTYPE))
    first, again = (device.once(lambda: (one.forward(), one.backward())) for _ in range(2))
    more = f" s, then {again * 1e3:.2f} ms"
    yield device.judged(at_most(f"first call of {name}", first, _LONGEST_FIRST_CALL, more=more))
