"""The kernels that serve this machine, why others do not, and what first calls cost."""

from collections.abc import Iterator

from megatron_burst.kernels import Kernel, Request
from megatron_burst.plans.visibility.band import Band
from megatron_burst.tools.doctor.attention import served
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_least, at_most
from megatron_burst.tools.one_rank import OneCall, Sizes

REMEDY = "--burst-kernel takes the fastest; install another (docs/install.md)"
_SLOWER = 0.9  # what auto takes may reach of the fastest
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
    yield from _speeds(device)


def _first_call(device: Device, name: str, kernel: Kernel) -> Iterator[Check]:
    tokens = 896 if device.is_gpu else 64  # a shape that no other stage has
    one = OneCall(kernel, Sizes(tokens, 8, 2, 128).draw(device.device, DTYPE))
    first, again = (device.timed(lambda: (one.forward(), one.backward())) for _ in range(2))
    more = f" s, then {again * 1e3:.2f} ms"
    yield device.judged(at_most(f"first call of {name}", first, _LONGEST_FIRST_CALL, more=more))


def _speeds(device: Device) -> Iterator[Check]:
    """Time kernels side by side, of which `auto` takes the first that serves."""
    sizes = Sizes(16384, 16, 16, 128) if device.is_gpu else Sizes(128, 4, 4, 16)
    tensors, dims = sizes.draw(device.device, DTYPE), (sizes.heads, sizes.head_dim, sizes.head_dim)
    of_both: dict[str, float] = {}
    for name, kernel in device.kernels(*sizes[1:]).items():
        for band, shape in ((Band.FULL, "full"), (Band.CAUSAL, "causal")):
            one = OneCall(kernel, tensors, band)
            times = [device.seconds(one.forward, 3), device.seconds(one.backward, 3)]
            of_both[name] = of_both.get(name, 0.0) + sum(times)
            flops = [attention_flops(one.pairs, *dims, backward=b) / 1e12 for b in (False, True)]
            speeds = [f"{work / seconds:.4g}" for work, seconds in zip(flops, times, strict=True)]
            speed = f"{' and '.join(speeds)} TFLOP/s, forward and backward"
            yield Check(f"{name}, {sizes.tokens} tokens, {shape}", speed)
    first, fastest = next(iter(of_both)), min(of_both, key=lambda name: of_both[name])
    more = f" ({first} beside {fastest})"
    ratio = of_both[fastest] / of_both[first]
    yield device.judged(at_least("auto's speed over the fastest's", ratio, _SLOWER, more=more))
