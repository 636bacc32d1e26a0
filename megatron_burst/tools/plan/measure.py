"""Measures the rates of the machine at hand and writes them as a cluster file."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatron_burst.kernels import Request, select_kernel
from megatron_burst.plans.mask import Band
from megatron_burst.tools import hardware
from megatron_burst.tools.flops import attention_flops, peak_tflops
from megatron_burst.tools.gpu_check.stage import Device
from megatron_burst.tools.one_rank import OneCall, Sizes

_TOKENS = {"cuda": 16384, "cpu": 512}
_WIDTH = {"cuda": 8192, "cpu": 256}  # of a product of squares
_BYTES = {"cuda": 2**30, "cpu": 2**24}


def write(path: str) -> None:
    """Measure and write a file that `--cluster` reads; its one table has the file's name.

    Raises:
        ValueError: the file's name does not end in .toml, or its folder is missing.
    """
    if not path.endswith(".toml"):
        raise ValueError(f"--measure {path}: a cluster file ends in .toml")
    if not Path(path).parent.is_dir():  # before it takes time
        raise ValueError(f"--measure {path}: there is no folder {Path(path).parent}")
    Path(path).write_text(cluster_file(Path(path).stem))
    print(f"wrote {path}: look at its links, then megatron-burst plan --cluster {path}")


def cluster_file(name: str) -> str:
    """Return the text of a cluster file with what this machine sustains."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if is_gpu else "cpu")
    gpus = torch.cuda.device_count() if is_gpu else 1
    model = torch.cuda.get_device_name() if is_gpu else hardware.cpu_model()
    memory, whose = _memory(device)
    rates = measured(device)
    peak, how_peak = peak_tflops(model), "data sheet"
    if peak is None:
        peak, how_peak = 1.5 * rates["linear_tflops"], "made up: 1.5 x linear_tflops"
    nics = [rate / 8 for rate in hardware.fastest_ports().values()]
    how = f"{model}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    lines = [
        "# Written by megatron-burst plan --measure.",
        f"[{json.dumps(name)}]",
        f"gpus_per_node = {gpus}",
        f"nics_per_node = {max(1, min(gpus, len(nics)))}",
        f"memory_gib = {memory / 2**30:.1f}  # {whose}",
        f"peak_tflops = {peak:.5g}  # {how_peak}",
        f"\n[{json.dumps(name)}.rates]",
        *(
            f"{rate} = [{value:.5g}, {json.dumps('measured')}, {json.dumps(how)}]"
            for rate, value in rates.items()
        ),
    ]
    if gpus == 1:
        lines.append(f'within_gb_s = [{rates["memory_gb_s"]:.5g}, "estimate", "one device alone"]')
    nic, source = (nics[0], "what its ports say") if nics else (1.0, "no port says its rate")
    lines.append(
        f'nic_gb_s = [{0.9 * nic:.5g}, "{"data sheet" if nics else "estimate"}", "{source}"]'
    )
    return "\n".join(lines) + "\n"


def _memory(device: torch.device) -> tuple[int, str]:
    """Return the bytes of a GPU, or without one all that this machine has, and whose they are."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "of a GPU"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "of the host: no GPU is here"


def measured(device: torch.device) -> dict[str, float]:
    """Return what the device sustains: attention, matrix products, copies, links to its peers."""
    kind = device.type
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    seconds = Device(device, Path()).seconds
    width, count = _WIDTH[kind], _BYTES[kind]
    a, b = torch.randn(2, width, width, device=device, dtype=dtype)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=kind == "cuda")
    found = {
        **_attention(device, dtype),
        "linear_tflops": 2 * width**3 / seconds(lambda: a @ b) / 1e12,
        "memory_gb_s": 2 * count / seconds(lambda: target.copy_(source)) / 1e9,
        "host_gb_s": count / seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9,
    }
    if kind == "cuda" and torch.cuda.device_count() > 1:
        peer = torch.empty_like(source, device="cuda:1")
        found["within_gb_s"] = count / seconds(lambda: peer.copy_(source)) / 1e9
    return found


def _attention(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of a full tile, forward and backward, by the kernel that training would take."""
    sizes, seconds = Sizes(_TOKENS[device.type], 16, 16, 128), Device(device, Path()).seconds
    dims = sizes.heads, sizes.head_dim, sizes.head_dim
    kernel = select_kernel("auto", Request(device, dtype, sizes.heads, *dims))
    one = OneCall(kernel, sizes.draw(device, dtype), Band.FULL)
    forward = attention_flops(one.pairs, *dims) / seconds(one.forward)
    backward = attention_flops(one.pairs, *dims, backward=True) / seconds(one.backward)
    return {"forward_tflops": forward / 1e12, "backward_tflops": backward / 1e12}
