"""The work of one rank against one call of its kernel; merges and loss against a copy.

The loops of a rank in the middle of a ring, with its kernels, merges and sums, but no messages.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_burst import linear_cross_entropy
from megatron_burst.attention.sums import PartialOutputs
from megatron_burst.kernels import Request, select_kernel
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.gpu_check.loss import inputs
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_least, at_most
from megatron_burst.tools.one_rank import OneCall, Sizes, silent_rank

REMEDY = "right but slow: see that nothing else uses the GPU, and run the stage again alone"
_EFFICIENCY, _OF_COPY = 0.95, 0.85
_MERGE_BYTES, _LOGIT_BYTES = 10, 6  # of an element, read and written; of a logit in a pass
# What the host has to know the result of.
_WAITS = {
    f"aten::{name}" for name in "_local_scalar_dense nonzero masked_select _unique2 equal".split()
}
RANKS = 8
A_RANK = f"a rank of {RANKS}"

type Row = Mapping[str, Any]


def check(device: Device) -> Iterator[Check]:
    """Time the tiles of a rank, look whether the host waits, time merges and the loss."""
    for row in measure(device, (16384, 65536, 131072)):
        name = f"{row['tokens']} tokens a rank, {row['name']}, {row['phase']}"
        check = at_least(name, row["speed"], _EFFICIENCY, more=f", {row['tflops']:.4g} TFLOP/s")
        judged = row["name"].startswith(A_RANK)
        yield device.judged(check) if judged else Check(name, check.found)
    yield _waits(device)
    copied = _copy_speed(device)
    yield Check("a copy", f"{copied / 1e9:.0f} GB/s read and written")
    first, merged = _merge(device)
    more = f", its first call {first:.2f} s"
    check = at_least("a merge's speed over a copy's", merged / copied, _OF_COPY, more=more)
    yield device.judged(check)
    for name, seconds, logits in _loss(device):
        moved = seconds * copied / logits
        name = f"bytes a logit in the time of the loss {name}"
        yield device.judged(at_most(name, moved, _LOGIT_BYTES / _OF_COPY))


def _waits(device: Device) -> Check:
    """Look whether a rank's loops, once planned, wait for the device."""
    sizes = Sizes(4096, 8, 2, 128) if device.is_gpu else Sizes(16, 4, 2, 32)
    found: list[str] = []
    for ring in ("kv", "query"):
        rank = silent_rank([0, 0, 1, 1], sizes.draw(device.device, DTYPE), backward=ring)
        rank.backward()  # what is compiled may wait
        with (
            profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen,
            _warnings_of_waits(device) as said,
        ):
            rank.forward()
            rank.backward()
        found += [event.name for event in seen.events() or () if event.name in _WAITS]
        found += [str(w.message) for w in said if "synchroniz" in str(w.message)]
    what = f": {', '.join(sorted(set(found)))}" if found else ""
    return at_most("times that the host waits in a ring", len(found), 0, "{:.0f}", more=what)


@contextmanager
def _warnings_of_waits(device: Device) -> Iterator[list[warnings.WarningMessage]]:
    """Let torch warn where the host waits for a GPU, and as before afterwards."""
    with warnings.catch_warnings(record=True) as said, ExitStack() as afterwards:
        warnings.simplefilter("always")
        if device.is_gpu:
            before = torch.cuda.get_sync_debug_mode()
            afterwards.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("warn")
        yield said


def _copy_speed(device: Device) -> float:
    """Return the bytes a second that a copy reads and writes."""
    x = torch.zeros(2**32 if device.is_gpu else 2**16, dtype=torch.uint8, device=device.device)
    other = torch.empty_like(x)
    return 2 * x.nbytes / device.seconds(lambda: other.copy_(x))


def _merge(device: Device) -> tuple[float, float]:
    """Return the seconds of a first merge, and the bytes a second of later ones.

    Counted are float32 sums, read and written, and a bfloat16 part.
    """
    sizes = Sizes(65536, 32, 32, 128) if device.is_gpu else Sizes(64, 4, 2, 32)
    q, *_, part = sizes.draw(device.device, DTYPE)
    lse = torch.zeros(1, sizes.heads, sizes.tokens, device=device.device)
    results, item = PartialOutputs(0, q, sizes.head_dim), Item(Kind.OUTPUT, 0)
    merge = partial(results.take, item, (part, lse), {})
    first = device.once(merge)
    return first, _MERGE_BYTES * q.numel() / device.seconds(merge)


def _loss(device: Device) -> Iterator[tuple[str, float, int]]:
    """Yield name, seconds and logits of a pass of the loss, less its products.

    Hidden states are short, so that products take little of the time.
    """
    tokens, rows, hidden, chunk = (8192, 131072, 128, 2048) if device.is_gpu else (32, 256, 16, 16)
    states, weight, targets = inputs(device, tokens, rows, hidden)
    some, fixed = states[:chunk].detach(), weight.detach()
    dlogits = some @ fixed.t()
    logits = device.seconds(lambda: torch.mm(some, fixed.t(), out=dlogits)) * (tokens // chunk)
    of_states = device.seconds(lambda: dlogits @ fixed) * (tokens // chunk)
    of_weight = device.seconds(lambda: dlogits.t() @ some) * (tokens // chunk)
    forward = partial(linear_cross_entropy, states, weight, targets, chunk_size=chunk)
    loss = forward()
    ones = torch.ones_like(loss)
    backward = partial(torch.autograd.grad, loss, (states, weight), ones, retain_graph=True)
    yield "forward", device.seconds(forward) - logits, tokens * rows
    yield "backward", device.seconds(backward) - logits - of_states - of_weight, tokens * rows


def measure(device: Device, tokens: Sequence[int]) -> Iterator[Row]:
    """Time the rank in the middle of 8, without messages, one call, and TransformerEngine's."""
    sizes = [Sizes(number, 32, 8, 128) for number in tokens]
    for each in sizes if device.is_gpu else [Sizes(64, 4, 2, 32)]:
        yield from _rows(device, each)
        device.free()


def _rows(device: Device, sizes: Sizes) -> Iterator[Row]:
    speeds: dict[str, float] = {}
    for (name, way), phase in product(_ways(device, sizes).items(), ("forward", "backward")):
        seconds = device.seconds(getattr(way, phase), 3)
        dims = sizes.heads, sizes.head_dim, sizes.head_dim
        flops = attention_flops(way.pairs, *dims, backward=phase == "backward") / seconds
        speeds.setdefault(phase, flops)  # of one call, the first
        row = {"name": name, "tokens": sizes.tokens, "phase": phase, "seconds": seconds}
        yield row | {"tflops": flops / 1e12, "speed": flops / speeds[phase]}


def _ways(device: Device, sizes: Sizes) -> dict[str, Any]:
    """Return what is timed: each has `pairs` of a forward, `forward` and `backward`."""
    # On so many tokens that the FLOPs are about those of one rank.
    whole = sizes._replace(tokens=round(sizes.tokens * RANKS**0.5 / 64) * 64 or sizes.tokens)
    request = Request(device.device, DTYPE, *sizes[1:], sizes.head_dim)
    one = OneCall(select_kernel("auto", request), whole.draw(device.device, DTYPE))
    tokens = f"{whole.tokens} tokens"
    ways: dict[str, Any] = {f"one call, {tokens}": one}
    tensors = sizes.draw(device.device, DTYPE)
    for ring in ("kv", "query"):
        way = silent_rank([0] * RANKS, tensors, backward=ring, topology="flat")
        ways[f"{A_RANK}, {ring} ring"] = way
    if device.is_gpu and find_spec("transformer_engine"):
        ways[f"TransformerEngine, {tokens}"] = _transformer_engine(device, whole, one.pairs)
    return ways


def _transformer_engine(device: Device, sizes: Sizes, pairs: int) -> SimpleNamespace:
    """Return both passes of TransformerEngine's causal attention, as Megatron's stock layers."""
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        sizes.heads,
        sizes.head_dim,
        num_gqa_groups=sizes.kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal",
    )
    *qkv, dout = sizes.draw(device.device, DTYPE)
    qkv = [x.requires_grad_() for x in qkv]
    out = attention(*qkv)
    dout = dout.reshape(out.shape)
    return SimpleNamespace(
        pairs=pairs,
        forward=lambda: attention(*qkv),
        backward=lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True),
    )
