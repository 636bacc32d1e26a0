"""The kernels of the packages mamba_ssm and fla, called as `rank_scan` needs them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_burst.plugin.scans.rank_scan import DeltaRule, Scanned, decayed
from megatron_burst.plugin.scans.shards import Shard
from megatron_burst.transport.pinned import to_device


def mamba_scan(
    kernel: Callable[..., Any], chunk: int, given: list[Tensor], shard: Shard, **options: Any
) -> Scanned:
    """Return Mamba-2's scan of a shard by mamba_ssm's `mamba_chunk_scan_combined`, without D and z.

    `given`: x [B, T, H, p], dt [B, T, H], positive, A [H], b and c [B, T, groups, n]. The kernel
    begins anew where `seq_idx` changes, and returns the state behind the last token, which ranks
    pass in dt's dtype. `options` are the kernel's: the dtype in which it keeps states on the way.
    """
    x, dt, decay, b, c = given
    numbers = to_device(shard.numbers(), x.device).expand(len(x), -1).contiguous()
    options |= {"seq_idx": numbers, "return_final_states": True}
    out, final = kernel(x, dt, decay, b, c, chunk, **options)
    return decayed(out, final.mT.to(dt.dtype), c, dt * decay, shard)


def fla_rule(kernel: Callable[..., Any]) -> DeltaRule:
    """Return fla's `chunk_gated_delta_rule` as a `DeltaRule`; float32 it takes since 0.4.0."""

    def rule(
        inputs: list[Tensor], memory: Tensor | None = None, bounds: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v, log_decay, beta = (x.contiguous() for x in inputs)
        cuts = to_device(torch.tensor(bounds), q.device) if bounds else None
        return kernel(
            *(q, k, v),
            g=log_decay,
            beta=beta,
            initial_state=memory,
            output_final_state=not bounds,
            cu_seqlens=cuts,
        )

    return rule
