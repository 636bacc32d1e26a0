"""The real plans of all ranks on one device, against the unsharded reference.

Buffers hold NaN from when a message is posted until it lands, so that what is read too early shows.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_burst.attention.kv import ExpandedLatents, expand
from megatron_burst.config import BurstConfig
from megatron_burst.kernels import Kernel
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.schedules.plan import Item, Kind
from megatron_burst.plans.visibility.interval import Interval
from megatron_burst.reference.dense import Expected, Reference, Spread
from megatron_burst.reference.verify import Finding, compare, margin_of
from megatron_burst.tools import verify
from megatron_burst.tools.arguments.verify import MASKS
from megatron_burst.tools.gpu_check.one_process import Post, ThreadedCommunicator, run_all
from megatron_burst.tools.gpu_check.stage import DTYPE, Check, Device, at_most, relative_error
from megatron_burst.tools.one_rank import OneRank, Sizes, context_of, drawing

REMEDY = "--burst-kernel takes another kernel; if all are wrong, --context-parallel-algo megatron"
_GRIDS = ((4, 4), (8, 4), (8, 2))  # ranks, and those of a node
_KV = {"backward": "kv", "topology": "double"}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "kv ring": _KV,
    "query ring": _KV | {"backward": "query"},
    "query ring, flat, gradients in bfloat16": {
        "backward": "query",
        "topology": "flat",
        "grad_dtype": "model",
    },
    "mesh": {"topology": "mesh"},
    "auto": {},  # under documents and block masks a direct exchange
    "ring": {"algorithm": "ring"},
    "allgather": {"algorithm": "allgather"},
}
_REFUSED = "no kernel can serve"  # what `select_kernel` says; any other error is ours


class _Case(NamedTuple):
    nodes: tuple[int, ...]  # of each rank
    setting: str
    mask: str
    sizes: Sizes


def check(device: Device) -> Iterator[Check]:
    """Compare every schedule under every mask, and on one of the grids with every kernel."""
    sizes = Sizes(256, 8, 2, 128) if device.is_gpu else Sizes(16, 4, 2, 16)
    expected = cache(_expected)  # which all schedules share
    kernels = device.kernels(sizes.heads, sizes.kv_heads, sizes.head_dim)
    for (place, kernel), (number, setting) in product(enumerate(kernels), enumerate(_SETTINGS)):
        grids, masks = list(_GRIDS), list(MASKS)
        if place or not device.is_gpu:  # each once, not each with each
            grids = [grids[(place + number) % len(grids)]]
        if not device.is_gpu:
            masks = [masks[(number + turned) % len(masks)] for turned in (0, 2)]
        for nodes in dict.fromkeys(_placed(setting, *grid) for grid in grids):
            cases = [_Case(nodes, setting, mask, sizes) for mask in masks]
            checks = _of_setting(device, kernel, cases, expected)
            yield from device.guarded(checks, f"{kernel}, {len(nodes)} ranks, {setting}: ")
    yield from _latents(device)


def _placed(setting: str, ranks: int, per_node: int) -> tuple[int, ...]:
    nodes = tuple(rank // per_node for rank in range(ranks))
    # A mesh has at least two rows and two columns.
    return tuple(range(4)) if setting == "mesh" and nodes[-1] < 3 else nodes


def _of_setting(
    device: Device, kernel: str, cases: Sequence[_Case], expected: Any
) -> Iterator[Check]:
    nodes, setting, *_ = cases[0]
    name = f"{kernel}, {len(nodes)} ranks on {len(set(nodes))} nodes, {setting}"
    worst: dict[str, Finding] = {}
    for case in cases:
        try:
            findings = run(device.device, kernel, case, expected)
        except ValueError as error:
            if _REFUSED not in str(error):
                raise
            yield Check(f"{name}, {case.mask}: refused", str(error).splitlines()[-1].strip())
            continue
        worst[case.mask] = finding = max(findings, key=lambda finding: finding.share)
        if finding.where:
            yield Check(f"{name}, {case.mask}", str(finding), passed=False)
    if worst:
        mask = max(worst, key=lambda m: worst[m].share)
        more = f" of what is allowed ({worst[mask].tensor}, {mask})"
        yield at_most(name, worst[mask].share, 1.0, more=more)


def run(device: torch.device, kernel: str, case: _Case, expected: Any) -> list[Finding]:
    """Run one call of all ranks, forward and backward, and compare it.

    Raises:
        ValueError: the kernel does not serve it.
    """
    ranks, tokens = len(case.nodes), len(case.nodes) * case.sizes.tokens
    config = BurstConfig(kernel=kernel, **_SETTINGS[case.setting])
    mask, _ = verify.masks(case.mask, tokens)
    whole = _drawn(device, case)
    layout = make_layout(config, tokens, ranks)
    post, lock, jobs = Post(), threading.Lock(), []
    for rank in range(ranks):
        q, k, v, dout = (layout.shard(x, rank, 1).contiguous() for x in whole)
        context = context_of(rank, case.nodes, config, ThreadedCommunicator(rank, ranks, post))
        one = OneRank(context, (q, k, v, dout), mask)
        one.call = replace(one.call, kernel=_one_at_a_time(one.call.kernel, lock))
        jobs.append(partial(_both_passes, one))
    unsharded = (layout.unshard(list(parts), 1) for parts in zip(*run_all(post, jobs), strict=True))
    actual = dict(zip(("out", "lse", "dq", "dk", "dv"), unsharded, strict=True))
    right = expected(device, case._replace(setting=""), margin_of(config, ranks))
    return compare(right, actual, torch.arange(tokens))


def _one_at_a_time(kernel: Kernel, lock: Any) -> Any:
    """Return a kernel for ranks that share a process: flash-attn 4's compiler serves one thread."""

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*given: Any) -> Any:
            with lock:
                return call(*given)

        return alone

    passes = {name: locked(getattr(kernel, name)) for name in ("forward", "backward")}
    return SimpleNamespace(name=kernel.name, **passes)


def _drawn(device: torch.device, case: _Case) -> list[Tensor]:
    """Draw two sequences of the tokens of all ranks."""
    sizes = case.sizes._replace(tokens=len(case.nodes) * case.sizes.tokens)
    pairs = zip(*(sizes.draw(device, DTYPE, seed) for seed in (0, 1)), strict=True)
    return [torch.cat(pair) for pair in pairs]


def _both_passes(rank: OneRank) -> list[Tensor]:
    (out, lse), (dq, dk, dv, _) = rank.forward(), rank.backward()
    return [out, lse.transpose(1, 2)[..., None], dq, dk, dv]


def _expected(device: torch.device, case: _Case, margin: float) -> list[Expected]:
    tokens = len(case.nodes) * case.sizes.tokens
    _, visibility = verify.masks(case.mask, tokens)
    q, k, v, dout = _drawn(device, case)
    spread = Spread([torch.arange(tokens)], None)
    reference = Reference(spread, visibility, case.sizes.head_dim**-0.5, q, k, v, margin=margin)
    return [*reference.expect(), *reference.expect(dout)]


def _latents(device: Device) -> Iterator[Check]:
    """Compare the products that stand between a visitor's latents and its K and V."""
    rank, rotary, heads, dim = (512, 64, 8, 128) if device.is_gpu else (32, 8, 4, 16)

    drawn = drawing(device.device, DTYPE)
    latent, rotary_key = drawn(1, dim, rank), drawn(1, dim, 1, rotary)
    weight = drawn(2 * heads * dim, rank)
    k, v = expand(latent[:, :, None], rotary_key, weight, heads, dim)
    dk, dv = drawn(*k.shape), drawn(*v.shape)
    kv = ExpandedLatents(0, k, v, latent, weight, differentiates_weight=True)
    made = kv.read(Item(Kind.KV, 1), kv.sent)
    dlatent, drotary = kv.reduce(Interval(0, dim), kv.sent, dk, dv)
    latent, rotary_key, weight = (x.double().requires_grad_() for x in (latent, rotary_key, weight))
    exact = expand(latent[:, :, None], rotary_key, weight, heads, dim)
    wide = dk.double(), dv.double()
    gradients = torch.autograd.grad(exact, (latent, rotary_key, weight), wide)
    assert kv.weight_gradient is not None
    actual = *made, dlatent[:, :, 0], drotary, kv.weight_gradient
    names = "k", "v", "dlatent", "drotary", "dweight"
    for name, mine, right in zip(names, actual, (*exact, *gradients), strict=True):
        allowed = 1e-2 if name in ("k", "v") else 1e-4  # gradients are not rounded
        yield at_most(f"latents, error of {name}", relative_error(mine, right), allowed)
