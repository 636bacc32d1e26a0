"""Emulated CPU kernels: they sleep, as if every rank had a processor of its own.

Eight ranks on two cores share them by chance, and what runs the same plan twice differs by a tenth.
Ranks whose kernels sleep leave the cores to messages and sums, and differ by a few hundredths.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst.attention import context
from megatron_burst.plans.choice.cost import attention_flops
from megatron_burst.plans.choice.machine import CPU, Machine

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_COPY_RATE = 1.5e9  # bytes/s on cores that are free; fitted to an early run of cpu_paced.md


@contextmanager
def paced(flops_a_second: float) -> Iterator[None]:
    """Make kernels sleep as long as their FLOPs take and return zeros; choose plans for such ranks.

    Contexts have to be made inside. Of a tile that is neither full nor causal the pairs that are
    masked count, too.
    """

    def machine_here(between: float | None = None) -> Machine:
        rates = dict.fromkeys(("forward_rate", "backward_rate", "linear_rate"), flops_a_second)
        free = {"copy_rate": _COPY_RATE, "hop_slowness": 0.0}  # messages hide behind who sleeps
        return replace(CPU, nic_rate=between or CPU.nic_rate, **free, **rates)

    with patch.object(context, "machine_here", machine_here), _Paced(flops_a_second):
        yield


class _Paced(TorchDispatchMode):
    """In the place of ATen's flash attention for CPUs."""

    def __init__(self, flops_a_second: float) -> None:
        super().__init__()
        self._rate = flops_a_second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.perf_counter()
        if func is _FORWARD:
            q, k, *_ = args
            self._wait(begun, q, k, causal=args[4:] == (True,))  # left out where it is False
            return _zeros(q), q.new_zeros(q.shape[:3])
        if func is _BACKWARD:
            _, q, k, v, _, _, _, causal = args
            self._wait(begun, q, k, causal=causal, backward=True)
            return _zeros(q), _zeros(k), _zeros(v)
        return func(*args, **(kwargs or {}))

    def _wait(
        self, begun: float, q: Tensor, k: Tensor, *, causal: bool, backward: bool = False
    ) -> None:
        batch, heads, queries, dim = q.shape  # [B, H, S, D]
        pairs = batch * queries * k.shape[2] / (2 if causal else 1)
        taken = attention_flops(pairs, heads, dim, dim, backward=backward) / self._rate
        time.sleep(max(0.0, begun + taken - time.perf_counter()))


def _zeros(like_BHSD: Tensor) -> Tensor:
    """Return zeros that lie in memory as the kernel's results do: [B, S, H, D]."""
    like_BSHD = like_BHSD.transpose(1, 2)
    return torch.zeros_like(like_BSHD, memory_format=torch.contiguous_format).transpose(1, 2)
