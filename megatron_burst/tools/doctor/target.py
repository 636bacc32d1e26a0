"""The machines that a command line is judged for."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import torch

from megatron_burst.cpu_platform.platform import cpu_platform_wanted


class Target(NamedTuple):
    """This machine, or a cluster that options describe."""

    nodes: int
    ranks_per_node: int  # processes that each node starts, one a GPU
    capability: tuple[int, int] | None = None  # of a cluster's GPUs; None: this machine

    @property
    def is_cluster(self) -> bool:
        """Whether options describe machines that are not this one."""
        return self.capability is not None

    @property
    def device(self) -> torch.device:
        """Of the tensors of attention."""
        return torch.device("cuda" if self.is_cluster or not cpu_platform_wanted() else "cpu")

    def __str__(self) -> str:
        ranks = f"{self.nodes} x {self.ranks_per_node} ranks"
        if self.capability is None:
            return f"on this machine ({self.device}): {ranks}"
        major, minor = self.capability
        return f"for the cluster: {ranks}, GPUs of compute capability {major}.{minor}"

    def pretended(self) -> AbstractContextManager[object]:
        """Let torch answer as on a cluster's GPUs."""
        if self.capability is None:
            return nullcontext()
        major, minor = self.capability
        return patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,  # cuDNN's version comes after a look at every device
            get_device_capability=lambda *_: (major, minor),
            get_device_properties=lambda *_: SimpleNamespace(major=major, minor=minor),
        )
