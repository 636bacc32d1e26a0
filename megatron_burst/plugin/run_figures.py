"""What a run adds to TensorBoard at its end: bytes sent for attention, and peak memory."""

import resource
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_tensorboard_writer

from megatron_burst.plugin.attention.core_attention import SharedState


def write_run_figures(args: Any, shared: SharedState | None) -> None:
    """Write the figures of a run that has ended: a call of all ranks; the last one writes.

    Args:
        args: Megatron's.
        shared: what sent the bytes; None where attention was Megatron's.
    """
    memory = _largest_of_all_ranks(_peak_memory())
    writer = get_tensorboard_writer()
    # args.iteration is where training started; there is no curr_iteration if it never did.
    steps = getattr(args, "curr_iteration", -1) + 1 - args.iteration
    if writer is None or steps < 1:
        return
    writer.add_scalar("burst/peak-memory-bytes", memory, args.curr_iteration)
    if shared is not None:
        sent = shared.bytes_sent - shared.bytes_sent_in_evaluation
        writer.add_scalar("burst/bytes-sent-per-rank", sent / steps, args.curr_iteration)
    writer.flush()


def _peak_memory() -> int:
    """Bytes that tensors took at most on this GPU; without one, the whole process on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _largest_of_all_ranks(value: int) -> int:
    if not dist.is_initialized():
        return value
    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)
