"""Several processes: what they compute, and over NCCL rates, memory, the host's lead, settings.

One child of so many ranks does all of it; every setting is timed in a child of its own.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_burst.tools.gpu_check.stage import Check, Device, at_most
from megatron_burst.tools.launch.site import ONE_MACHINE
from megatron_burst.transport.nccl import loaded

REMEDY = "set what is chosen; where results are wrong, train with --context-parallel-algo megatron"
_SHARED_SINCE = 2, 30, 7  # NCCL, from its sources: before, "Duplicate GPU detected"
_SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8"}
_RESERVED = 1.3  # of the documented peak: kernels' own memory, and what the allocator cannot use
_MARGIN = "SMs that flash3 leaves"
_AXES: Mapping[str, tuple[str, ...]] = {  # the first is how it is, "" as the environment says
    _MARGIN: ("8", "0", "16", "32"),
    "NCCL_MAX_CTAS": ("", "4", "8", "16", "32"),
    "NCCL_CGA_CLUSTER_SIZE": ("", "4"),  # ours is 1, NCCL's own on Hopper 4
    "TORCH_NCCL_HIGH_PRIORITY": ("", "0"),  # ours is 1, torch's own 0
    "CUDA_DEVICE_MAX_CONNECTIONS": ("", "1", "8"),
}
_USUAL = _AXES[_MARGIN][0]
_WORTH = 0.98  # of the time as it is: what is not this much faster is not chosen


def check(device: Device) -> Iterator[Check]:
    """Compare and measure as it is, then with one setting changed at a time, and choose."""
    ranks, backend = device.ranks, "nccl" if device.is_gpu else "gloo"
    shared: Mapping[str, str] = {}
    if device.is_gpu and torch.cuda.device_count() < ranks:
        why_not = refusal(ranks, torch.cuda.device_count(), loaded())
        if why_not:
            yield Check("NCCL", f"left out: {why_not}")
        backend, shared = ("gloo", {}) if why_not else (backend, _SHARING)
    torchrun = "-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", str(ranks)
    module = f"{__package__}.one_of_ranks"
    command = [sys.executable, *torchrun, "-m", module, device.device.type, backend]

    def run(name: str, margin: str, settings: Mapping[str, str], *more: str) -> Any:
        device.say(f"{ranks} ranks over {backend}, {name}")
        return parsed(name, *finished([*command, margin, *more], {**shared, **settings}))

    measured, failed = run("results and messages", _USUAL, {}, "compare")
    yield from failed
    for name, answer in measured.get("results", {}).items():
        yield from judge(f"{ranks} ranks over {backend}, {name}", answer)
    if "messages" in measured:
        yield from _said(device, measured)
    if backend == "gloo" or shared or failed:
        text = "not timed: over gloo, or where ranks share a GPU, times say nothing of them"
        yield Check("settings", text)
        return
    for axis, (usual, *others) in _AXES.items():
        times = {usual or "as it is": _layer(measured)}
        for value in others:
            margin, settings = (value, {}) if axis == _MARGIN else (_USUAL, {axis: value})
            other, failed = run(f"{axis} {value}", margin, settings)
            yield from failed or [Check(f"{axis} {value}", _figures(other))]
            times |= {} if failed else {value: _layer(other)}
        yield Check(f"choice: {axis}", chosen(times))


def refusal(ranks: int, gpus: int, nccl: tuple[int, ...]) -> str:
    """Say why NCCL does not serve so many ranks on so few GPUs; nothing where it does."""
    version, since = (".".join(map(str, numbers)) for numbers in (nccl, _SHARED_SINCE))
    if nccl < _SHARED_SINCE:
        said = f"{gpus} GPU cannot show it, {version} takes no two ranks on one, {since} does"
        return f"{said}: LD_PRELOAD its libnccl.so.2"
    return f"NCCL {version} takes two ranks on a GPU" if ranks > 2 * gpus else ""


def finished(
    command: Sequence[str], settings: Mapping[str, str], limit: float = 300.0
) -> tuple[str, str]:
    """Return what torchrun and its ranks print, on stdout and stderr, in so many seconds."""
    pipe, env = subprocess.PIPE, {**os.environ, **settings}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as running:
        try:
            return running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            running.terminate()  # torchrun then ends its ranks; a kill would leave them on the GPU
            printed, errors = running.communicate()
            return "", f"{errors or printed}\nnot at its end after {limit:g} s"
        finally:
            running.terminate()  # where this process is told to end
            signal.signal(signal.SIGTERM, before)


def parsed(name: str, printed: str, errors: str) -> tuple[dict[str, Any], list[Check]]:
    """Return the JSON that was printed, or as a failure what was said in its place."""
    try:
        begin = f"\n{printed}".index("\n{")  # NCCL_DEBUG=INFO logs before it and behind it
        return json.JSONDecoder().raw_decode(printed, begin)[0], []
    except ValueError:
        said = errors[-2000:] or printed[-2000:]
        return {}, [Check(name, f"no result: {said}", passed=False)]


def judge(name: str, content: Mapping[str, Any]) -> Iterator[Check]:
    """Yield the worst of what `verify` has found, and every problem."""
    for problem in content["problems"]:
        yield Check(name, problem, passed=False)
    shares = {
        f"{tensor}; {case}": result["error"] / (result["allowed"] or 1e-300)
        for case, tensors in content["results"].items()
        for tensor, result in tensors.items()
    }
    worst = max(shares, key=lambda key: shares[key], default="")
    name, more = f"{name}: {len(content['results'])} cases", f" of what is allowed ({worst})"
    yield at_most(name, shares.get(worst, 1e9), 1.0, more=more)


def _said(device: Device, measured: Mapping[str, Any]) -> Iterator[Check]:
    """Yield what was measured as it is."""
    yield Check("messages", _figures(measured))
    bare = measured["messages"]
    for where, posted in (("before", "posted before a tile"), ("in", "posted while a tile runs")):
        seconds, tile = bare[where], bare[f"tile, {where}"]
        there = f"{bare['alone'] / seconds:.2f} of its rate alone, landed at {seconds / tile:.2f}"
        slower = f" of the tile, which took {tile / bare['tile']:.2f} of its time alone"
        yield Check(f"a message {posted}", there + slower)
    for name, of in measured["layers"].items():
        lead = f"host {of['host'] * 1e3:.2f} ms of {of['layer'] * 1e3:.2f} ms a layer"
        yield Check(f"{name}: lead", f"{lead}, {of['alone'] * 1e3:.2f} ms without messages")
        if device.is_gpu:
            grown = [(of[key] - of["before"]) / 2**20 for key in ("connected", "used")]
            memory = "{:.0f} MiB connected, {:.0f} MiB after the first layer".format(*grown)
            yield Check(f"{name}: memory of communicators", memory)
            yield at_most(f"{name}: allocator retries", of["retries"], 0, "{:.0f}")
            what = f"{name}: reserved over the documented peak"
            yield at_most(what, of["reserved"] / of["documented"], _RESERVED)


def _figures(measured: Mapping[str, Any]) -> str:
    bare, layers = measured["messages"], measured["layers"].values()
    alone, beside = (bare["bytes"] / bare[key] / 1e9 for key in ("alone", "in"))
    used = [f"{(of['used'] - of['before']) / 2**20:.0f} MiB of NCCL" for of in layers]
    times = [f"{of['layer'] * 1e3:.2f} ms and {mib}" for of, mib in zip(layers, used, strict=True)]
    return f"{alone:.4g} GB/s, {beside:.4g} GB/s beside a tile; a layer {', '.join(times)}"


def _layer(measured: Mapping[str, Any]) -> float:
    return float(measured["layers"]["kv ring, flat"]["layer"])


def chosen(times: Mapping[str, float]) -> str:
    """Say which value makes a layer fastest; the first unless another is worth it."""
    first, best = next(iter(times)), min(times, key=lambda value: times[value])
    best = best if times[best] <= _WORTH * times[first] else first
    return f"{best}, {times[best] / times[first]:.3f} of the time of {first}"
