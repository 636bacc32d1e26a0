"""Which backend serves a process group: it may have one for each kind of device."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_burst.transport.watchdog import Limit


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of each kind of device; `init_process_group()` makes gloo and NCCL."""
    config = dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    return {device: str(name) for device, name in config.get_device_backend_map().items()}


def is_by_gloo(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Whether gloo carries tensors of such a device, from the host's memory if it has no other."""
    of_device = backends(group)
    return of_device.get(device_type, of_device.get("cpu")) == dist.Backend.GLOO


def nccl_of(group: dist.ProcessGroup | None) -> Any:
    """Return torch's backend of the NCCL that a group has for GPUs; None if it has none."""
    if group is None or backends(group).get("cuda") != dist.Backend.NCCL:
        return None
    return backend_of(group, torch.device("cuda"))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return torch's backend of a device, out of what TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it in.

    Not every torch lets what it is wrapped in say whether operations can be posted together.
    """
    backend = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)


def nccl_limit(group: dist.ProcessGroup | None, usual: float) -> Limit:
    """Return what reads the group's own time limit, which Megatron may change, in seconds."""
    options = getattr(nccl_of(group), "options", None)

    def limit() -> float:
        timeout = getattr(options, "_timeout", None)
        return timeout.total_seconds() if timeout else usual

    return limit
