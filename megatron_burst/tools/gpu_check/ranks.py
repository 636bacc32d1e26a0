"""Four processes that share the device, over gloo, by `megatron-burst verify`."""

import json
import subprocess
import sys
from collections.abc import Iterator

from megatron_burst.tools.gpu_check.stage import Check, Device, at_most

REMEDY = "train with --context-parallel-algo megatron; megatron-burst verify narrows the case down"
_RUNS = {
    "4 ranks as two nodes": "--algorithm burst ring allgather --gpus-per-node 2 "
    "--mask causal window documents blocks",
    "4 ranks, heads": "--algorithm ulysses --mask causal documents",
    "4 ranks, heads and a ring": "--head-parallel-size 2 --sink",
}
_VERIFY = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
    *("-m", "megatron_burst", "verify", "--json", "--backend", "gloo"),
)
_SIZES = "--dtype bfloat16 --heads 8 --kv-heads 4 --head-dim 128 --tokens-per-rank 512".split()
_SMALL = "--dtype float32 --heads 4 --head-dim 8 --tokens-per-rank 16".split()


def check(device: Device) -> Iterator[Check]:
    """Start four ranks for every run, and judge what they have found."""
    for name, flags in _RUNS.items():
        sizes = _SIZES if device.is_gpu else _SMALL
        words = [*flags.split(), *sizes, "--device", device.device.type]
        limit = 180.0 if device.is_gpu else 600.0  # seconds: with the other runs ten minutes
        yield from judge(name, *_finish([*_VERIFY, *words], limit))


def _finish(command: list[str], limit: float) -> tuple[str, str]:
    """Return what a command has printed, on stdout and on stderr; after so many seconds end it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            return running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            running.terminate()  # torchrun then ends its ranks; a kill would leave them on the GPU
            printed, errors = running.communicate()
            return "", f"{errors or printed}\nnot at its end after {limit:g} s"


def judge(name: str, printed: str, errors: str) -> Iterator[Check]:
    """Yield the worst of the findings, and every problem."""
    try:
        content = json.loads(printed[printed.index("{") :])
    except ValueError:
        yield Check(name, f"no result: {errors[-2000:] or printed[-2000:]}", passed=False)
        return
    for problem in content["problems"]:
        yield Check(name, problem, passed=False)
    shares = {
        f"{tensor}; {case}": found["error"] / (found["allowed"] or 1e-300)
        for case, tensors in content["results"].items()
        for tensor, found in tensors.items()
    }
    worst = max(shares, key=lambda key: shares[key], default="")
    name, more = f"{name}: {len(content['results'])} cases", f" of what is allowed ({worst})"
    yield at_most(name, shares.get(worst, 1e9), 1.0, more=more)
