"""Measures the rates of the machine at hand and writes them as a cluster file."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatron_burst.kernels import Request, select_kernel
from megatron_burst.plans.visibility.band import Band
from megatron_burst.tools import hardware
from megatron_burst.tools.flops import attention_flops, peak_tflops
from megatron_burst.tools.gpu_check.stage import Device
from megatron_burst.tools.one_rank import OneCall, Sizes
from megatron_burst.tools.replacing import write_text


def write(path: str) -> None:
    """Measure and write a file that `--cluster` reads; its one table has the file's name.

    Raises:
        ValueError: the file's name does not end in .toml, or its folder is missing.
    """
    if not path.endswith(".toml"):
        raise ValueError(f"--measure {path}: a cluster file ends in .toml")
    if not Path(path).parent.is_dir():  # before it takes time
        raise ValueError(f"--measure {path}: there is no folder {Path(path).parent}")
    write_text(Path(path), cluster_file(Path(path).stem))
    print(f"wrote {path}: look at its links, then megatron-burst plan --cluster {path}")


def cluster_file(name: str) -> str:
    """Return the text of a cluster file with what this machine sustains."""
    of_host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        device, gpus, model = "cuda", torch.cuda.device_count(), torch.cuda.get_device_name()
        memory, whose = torch.cuda.get_device_properties(0).total_memory, "of a GPU"
    else:
        device, gpus, model = "cpu", 1, hardware.cpu_model()
        memory, whose = of_host, "of the host: no GPU is here"
    how = f"{model}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    rates = measured(torch.device(device))
    peak, how_peak = peak_tflops(model), "data sheet"
    if peak is None:
        peak, how_peak = 1.5 * rates["linear_tflops"], "made up: 1.5 x linear_tflops"
    known = {rate: (value, "measured", how) for rate, value in rates.items()}
    if gpus == 1:
        known["within_gb_s"] = rates["memory_gb_s"], "estimate", "one device alone"
    nics = [rate / 8 for rate in hardware.fastest_ports().values()]
    known["nic_gb_s"] = 0.9, "estimate", "no port says its rate"
    if nics:
        known["nic_gb_s"] = 0.9 * nics[0], "data sheet", "what its ports say"
    lines = [
        "# Written by megatron-burst plan --measure.",
        f"[{json.dumps(name)}]",
        f"gpus_per_node = {gpus}",
        f"nics_per_node = {max(1, min(gpus, len(nics)))}",
        f"memory_gib = {memory / 2**30:.1f}  # {whose}",
        f"host_gib = {of_host / 2**30:.1f}",
        f"peak_tflops = {peak:.5g}  # {how_peak}",
        f"\n[{json.dumps(name)}.rates]",
    ]
    for rate, (value, *source) in known.items():
        lines.append(f"{rate} = [{value:.5g}, {', '.join(map(json.dumps, source))}]")
    return "\n".join(lines) + "\n"


def measured(device: torch.device) -> dict[str, float]:
    """Return what the device sustains: attention, matrix products, copies, links to its peers.

    Each lets its tensors go before the next begins. Attention is a full tile, by the kernel that
    training would take.
    """
    timed = Device(device, Path())
    return {**_attention(timed), **_products(timed), **_copies(timed)}


def _attention(timed: Device) -> dict[str, float]:
    dtype = _dtype(timed)
    sizes, dims = Sizes(16384 if timed.is_gpu else 512, 16, 16, 128), (16, 128, 128)
    kernel = select_kernel("auto", Request(timed.device, dtype, 16, *dims))
    one = OneCall(kernel, sizes.draw(timed.device, dtype), Band.FULL)
    forward = attention_flops(one.pairs, *dims) / timed.seconds(one.forward)
    backward = attention_flops(one.pairs, *dims, backward=True) / timed.seconds(one.backward)
    return {"forward_tflops": forward / 1e12, "backward_tflops": backward / 1e12}


def _products(timed: Device) -> dict[str, float]:
    width = 8192 if timed.is_gpu else 256
    a, b = torch.randn(2, width, width, device=timed.device, dtype=_dtype(timed))
    return {"linear_tflops": 2 * width**3 / timed.seconds(lambda: a @ b) / 1e12}


def _copies(timed: Device) -> dict[str, float]:
    count = 2**30 if timed.is_gpu else 2**24
    source = torch.empty(count, dtype=torch.uint8, device=timed.device)
    target = torch.empty_like(source)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=timed.is_gpu)
    found = {
        "memory_gb_s": 2 * count / timed.seconds(lambda: target.copy_(source)) / 1e9,
        "host_gb_s": count / timed.seconds(lambda: target.copy_(host, non_blocking=True)) / 1e9,
    }
    if timed.is_gpu and torch.cuda.device_count() > 1:
        peer = torch.empty_like(source, device="cuda:1")
        found["within_gb_s"] = count / timed.seconds(lambda: peer.copy_(source)) / 1e9
    return found


def _dtype(timed: Device) -> torch.dtype:
    return torch.bfloat16 if timed.is_gpu else torch.float32
