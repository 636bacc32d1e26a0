"""Stand-ins for what is shared by the attention calls of a context-parallel group, and for CUDA."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_burst import BurstConfig
from megatron_burst.plans.choice.head_parallel import head_groups
from megatron_burst.plans.choice.layouts import make_layout
from megatron_burst.plans.visibility.layout import Layout


def group_of(ranks: int, rank: int = 0) -> Any:
    """A process group as far as its size and this rank are asked for."""
    return SimpleNamespace(size=lambda: ranks, rank=lambda: rank)


class Context:
    """What positions need of a context."""

    def __init__(self, config: BurstConfig, ranks: int, rank: int) -> None:
        self.config, self.ranks, self.rank = config, ranks, rank
        self.group = None
        self.nodes, self.heads = [0] * ranks, head_groups([0] * ranks, 1)
        self.said: set[Any] = set()

    def layout(self, tokens: int) -> Layout:
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


def rotary_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron's rotary embeddings, which move frequencies and an index to the GPU, be made."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    plain = torch.tensor
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.Tensor, "cuda", lambda x, **_: x)
    patch.setattr(torch, "tensor", lambda *x, pin_memory=False, **y: plain(*x, **y))
    RotaryEmbedding.forward.cache_clear()


def copies_at_once(patch: pytest.MonkeyPatch) -> list[Any]:
    """Let copies to the host and back be the CPU's, done at once; return the streams that are made.

    `tests/streams.py` orders them.
    """
    made: list[Any] = []
    nothing = {name: lambda *_: None for name in ("wait_stream", "wait_event", "record_event")}
    stream = SimpleNamespace(**nothing)
    empty = torch.empty
    patch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    patch.setattr(torch.cuda, "Stream", lambda _: made.append(stream) or stream)
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda _: stream)
    return made
