"""Stand-ins for what is shared by the attention calls of a context-parallel group."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst import BurstConfig
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.visibility.layout import Layout


class Context:
    """What positions need of a context."""

    def __init__(self, config: BurstConfig, ranks: int, rank: int) -> None:
        self.config, self.ranks, self.rank = config, ranks, rank
        self.group, self.asked = None, 0
        self.nodes, self.heads = [0] * ranks, head_groups([0] * ranks, 1)
        self.said: set[Any] = set()

    def layout(self, tokens: int) -> Layout:
        self.asked += 1
        return make_layout(self.config, tokens, self.ranks)

    def should_log(self, about: Any) -> bool:
        return not (about in self.said or self.said.add(about))


class Copies(TorchDispatchMode):
    """Counts the tensors that go from the host to a device, for which the host may wait."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten._to_copy:
            self.count += args[0].device != result.device
        return result
