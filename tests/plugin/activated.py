"""What an activated CPU platform has to do; `main` runs in a process that has activated it."""

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.jit import jit_fuser
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megatron_burst.cpu_platform import platform, recurrences, table


def check_tensors() -> None:
    made = (
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.empty(2, device="cuda:0", pin_memory=True),
        torch.ones(1, device="cuda"),
        torch.empty_like(torch.ones(2), device="cuda"),
    )
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert torch.zeros(1, device="meta").device.type == "meta"
    assert made[0].cuda(non_blocking=True).pin_memory() is made[0]
    assert made[0].type() == "torch.cuda.FloatTensor"
    assert made[0].bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert made[0].type(torch.int64).dtype == torch.int64
    linear = torch.nn.Linear(2, 2).cuda(torch.cuda.current_device())
    assert linear.weight.device.type == "cpu"
    assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == 0
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        torch.cuda.Event(enable_timing=True).record()


def check_groups() -> None:
    limit = timedelta(seconds=77)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    devices = set()
    for group in (dist.group.WORLD, dist.new_group([0], timeout=limit)):
        options = group._get_backend(torch.device("cpu")).options
        assert (options._threads, options._timeout) == (1, limit), options._threads
        devices |= set(options._devices)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2), group=group)
    assert len(devices) == 1, "the groups share it"


def check_random_numbers() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("one", 7)
    outside = torch.get_rng_state()
    with tracker.fork("one"):
        first = torch.rand(3)
    with tracker.fork("one"):
        second = torch.rand(3)
    assert torch.equal(outside, torch.get_rng_state()) and not torch.equal(first, second)
    torch.manual_seed(7)
    loader = table.drawing_apart(torch.utils.data.DataLoader)([1, 2])
    assert len(list(loader)) == 2
    assert torch.equal(first, torch.rand(3))


def check_recurrences() -> None:
    from fla.ops.cp import build_cp_context  # as Megatron's dev does

    assert build_cp_context is recurrences.build_cp_context
    assert mamba_mixer.HAVE_MAMBA_SSM and common.HAVE_FLA
    assert mamba_mixer.causal_conv1d_fn is None
    assert issubclass(mamba_mixer.ExtendedRMSNorm, recurrences.RMSNorm)
    for module, names in (
        (mamba_mixer, "mamba_chunk_scan_combined mamba_split_conv1d_scan_combined"),
        (common, "causal_conv1d l2norm chunk_gated_delta_rule"),
    ):
        assert all(getattr(module, name) is getattr(recurrences, name) for name in names.split())


def main() -> None:
    assert platform.cpu_platform_active()
    check_tensors()
    check_groups()
    check_random_numbers()
    check_recurrences()
    assert jit_fuser(abs) is abs
