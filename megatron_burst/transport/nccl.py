"""What we rely on of NCCL, in which versions that was read, and the options of our communicators.

Read in its sources, and in torch's around it:

* a peer gets as many channels as the one of all ranks of a communicator that gets the fewest, be
  there messages to it or not (`ncclTopoComputeP2pChannels`): so few ranks in each;
* a communicator that leaves the node moves 128 KiB at a time, one within NVLink 512 (`init.cc`);
* the first message of a pair, of one element too, connects all channels that it will ever use,
  each with its buffers, while the host waits for the peer (`p2pTaskAppend`);
* the first operation makes the communicator, for which NCCL waits for all of its ranks;
* more than 256 operations in one group may hang;
* NCCL_MAX_CTAS, NCCL_CGA_CLUSTER_SIZE and their like win over options (`envConfigOverride`);
  TORCH_NCCL_HIGH_PRIORITY, which is torch's, only where it is 1: a 0 we carry out ourselves.
"""

import ctypes
import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.transport.backend import nccl_of

_READ = (2, 27), (2, 30)  # the first version and the last
# Clusters of 4 CTAs, as is usual on Hopper, want room in one part of the GPU, beside attention.
_CLUSTER = 1  # not timed
_NO = {"0", "N", "NO", "F", "FALSE"}  # as torch reads its variables
MOST_PEERS = 126  # of a group of operations: there and back 252
_CALLERS = "min_ctas max_ctas cga_cluster_size net_name cta_policy traffic_class".split()


def loaded() -> tuple[int, ...]:
    """Return the version of the NCCL that is used; torch says which one it was built with."""
    built = torch.cuda.nccl.version()
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except OSError:  # it is a part of torch
        return built
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def unread(version: tuple[int, ...]) -> str:
    """Say of a version that nobody looked whether it does what we rely on; "" if somebody did."""
    first, last = _READ
    if first <= version[:2] <= last:
        return ""
    return "what our messages rely on was read in {}.{} to {}.{} alone".format(*first, *last)


def options_like(callers: Iterable[dist.ProcessGroup], limit: timedelta, max_ctas: int) -> Any:
    """Return options of a new communicator, for it alone: torch writes into them.

    Its stream has high priority, so that messages do not wait for what computes, unless
    TORCH_NCCL_HIGH_PRIORITY says no. What a caller's groups were given, as by Megatron's
    --nccl-communicator-config-path, wins over ours.
    """
    first = os.environ.get("TORCH_NCCL_HIGH_PRIORITY", "1").upper() not in _NO
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=first)
    options._timeout = limit
    unset = dist.ProcessGroupNCCL.Options().config
    given: dict[str, Any] = {"max_ctas": max_ctas, "cga_cluster_size": _CLUSTER}
    for group in callers:
        config = getattr(getattr(nccl_of(group), "options", None), "config", unset)
        said = {name: getattr(config, name, None) for name in _CALLERS}
        given |= {n: value for n, value in said.items() if value != getattr(unset, n, None)}
    given["max_ctas"] = max(given["max_ctas"], given.get("min_ctas", 0))
    for name, value in given.items():
        setattr(options.config, name, value)
    return options
