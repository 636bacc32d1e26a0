"""One rank's share of a ring, on one device, beside single calls of as many FLOPs."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from megatron_burst.kernels import Request, select_kernel
from megatron_burst.tools.flops import attention_flops
from megatron_burst.tools.gpu_check.stage import DTYPE, Device
from megatron_burst.tools.one_rank import OneCall, Sizes, silent_rank

RANKS = 8
A_RANK = f"a rank of {RANKS}"

type Row = Mapping[str, Any]


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
