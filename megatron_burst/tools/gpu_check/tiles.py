"""The work of one rank against one call of its kernel.

The loops of a rank in the middle of a ring, with its kernels, merges and sums, but no messages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_burst.kernels import Request, select_kernel
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_least, at_most
from megatron_burst.tools.one_rank import OneCall, OneRank, Sizes, silent_rank

REMEDY = "right but slow: see that nothing else uses the GPU, and run the stage again alone"
_EFFICIENCY = 0.95
# What the host has to know the result of.
_WAITS = {
    f"aten::{name}" for name in "_local_scalar_dense nonzero masked_select _unique2 equal".split()
}
RANKS = 8
A_RANK = f"a rank of {RANKS}"


def check(device: Device) -> Iterator[Check]:
    """Time the tiles of a rank, and look whether the host waits."""
    for tokens in (16384, 65536) if device.is_gpu else (64,):
        sizes = Sizes(tokens, 32, 8, 128) if device.is_gpu else Sizes(tokens, 4, 2, 32)
        for name, speed, tflops in _rows(device, sizes):
            what, more = f"{tokens} tokens a rank, {name}", f", {tflops:.4g} TFLOP/s"
            check = at_least(what, speed, _EFFICIENCY, more=more)
            judged = name.startswith(A_RANK)
            yield device.judged(check) if judged else Check(what, check.found)
        device.free()
    yield _waits(device)


def _waits(device: Device) -> Check:
    """Look whether a rank's loops, once planned, wait for the device; a GPU raises an error."""
    sizes = Sizes(4096, 8, 2, 128) if device.is_gpu else Sizes(16, 4, 2, 32)
    waits: list[str] = []
    for ring in ("kv", "query"):
        rank = silent_rank([0, 0, 1, 1], sizes.draw(device.device, DTYPE), backward=ring)
        rank.backward()  # what is compiled may wait
        with (
            profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen,
            _errors_for_waits(device),
        ):
            rank.forward()
            rank.backward()
        waits += [event.name for event in seen.events() or () if event.name in _WAITS]
    what = f": {', '.join(sorted(set(waits)))}" if waits else ""
    return at_most("times that the host waits in a ring", len(waits), 0, "{:.0f}", more=what)


@contextmanager
def _errors_for_waits(device: Device) -> Iterator[None]:
    try:
        if device.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if device.is_gpu:
            torch.cuda.set_sync_debug_mode("default")


def _rows(device: Device, sizes: Sizes) -> Iterator[tuple[str, float, float]]:
    """Yield what is timed, its speed over that of one call, and its TFLOP/s.

    The rank in the middle of 8, without messages, and one call of about as many FLOPs.
    """
    whole = sizes._replace(tokens=round(sizes.tokens * RANKS**0.5 / 64) * 64 or sizes.tokens)
    request = Request(device.device, DTYPE, *sizes[1:], sizes.head_dim)
    one = OneCall(select_kernel("auto", request), whole.draw(device.device, DTYPE))
    ways: dict[str, OneCall | OneRank] = {f"one call, {whole.tokens} tokens": one}
    tensors = sizes.draw(device.device, DTYPE)
    for ring in ("kv", "query"):
        rank = silent_rank([0] * RANKS, tensors, backward=ring, topology="flat")
        ways[f"{A_RANK}, {ring} ring"] = rank
    speeds: dict[str, float] = {}
    for (name, way), phase in product(ways.items(), ("forward", "backward")):
        seconds = device.seconds(getattr(way, phase), 3)
        dims = sizes.heads, sizes.head_dim, sizes.head_dim
        flops = attention_flops(way.pairs, *dims, backward=phase == "backward") / seconds
        speeds.setdefault(phase, flops)  # of one call, the first
        yield f"{name}, {phase}", flops / speeds[phase], flops / 1e12
