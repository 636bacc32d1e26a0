"""One rank's attention on fake CUDA tensors: what lives when, without a device or other ranks."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_burst import BurstConfig, BurstContext, Mask
from megatron_burst.attention import context as contexts
from megatron_burst.attention.backward import backward
from megatron_burst.attention.context import AttentionCall
from megatron_burst.attention.forward import forward
from megatron_burst.attention.keys import Keys
from megatron_burst.kernels import TileCall
from megatron_burst.plans.topology import choose_grid
from megatron_burst.transport.comm import Communicator
from megatron_burst.transport.groups import channels_of

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "bench"))

from live_bytes import LiveBytes  # noqa: E402


class EmptyKernel:
    """Returns what a kernel returns, without values."""

    name = "empty"

    def reasons_against(self, _: Any) -> list[str]:
        return []

    def forward(self, tile: TileCall) -> Any:
        q, _, v = tile.qkv
        lse_BHS = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        return q.new_empty((*q.shape[:3], v.shape[3])), lse_BHS

    def backward(self, tile: TileCall, *_: Tensor) -> Any:
        return tuple(x.new_empty(x.shape) for x in tile.qkv)


@dataclass(frozen=True)
class Peaks:
    """Most bytes that live beyond q, k, v (and dout and out in the backward), in those of q."""

    forward: float
    backward: float
    call: AttentionCall


def peaks(
    ranks: int,
    nodes: int,
    backward_ring: str,
    mask: Mask,
    *,
    tokens: int = 1024,
    kv_heads: int = 4,
    topology: str = "",
    kernel: Any = None,
) -> Peaks:
    """Count the middle rank's forward and backward in bfloat16, [1, tokens, 4 heads, 128]."""
    topology = topology or ("flat" if nodes == 1 else "double")
    config, rank = BurstConfig(backward=backward_ring, topology=topology), ranks // 2
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        node_of = [r * nodes // ranks for r in range(ranks)]
        grid, _ = choose_grid(config.shape_of_rings, node_of)
        channels = {c: dist.new_group(list(range(ranks))) for c in channels_of(grid)}
        communicator = Communicator(range(ranks), channels, 60.0)
        communicator._watchdog = None  # nothing gets through
        context = BurstContext(config, dist.group.WORLD, grid, node_of, communicator)
        with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
            patch.setattr(contexts, "select_kernel", lambda *_: kernel or EmptyKernel())
            q, k, v = (
                torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
                for heads in (4, kv_heads, kv_heads)
            )
            call = context.prepare(q, k, v, mask, 1.0)
            keys = Keys(call.forward_plan.rank, k, v)
            with LiveBytes((q, k, v)) as live:
                out, lse = forward(q, keys, call)
            dout = torch.empty_like(out)
            with LiveBytes((q, k, v, out, lse, dout)) as live_backward:
                backward(dout, q, keys, out, lse, call)
            return Peaks(live.peak / q.nbytes, live_backward.peak / q.nbytes, call)
    finally:
        dist.destroy_process_group()
