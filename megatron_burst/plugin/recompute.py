"""Finds, in the second pass of a checkpointed layer, what attention kept in the first.

Megatron runs a checkpointed function twice and says to nobody which second pass belongs to which
first. But the checkpoint saves its input: the second pass starts from a detached alias of it, in
the same storage. What is kept hangs on that storage, weakly: it lives as long as the forward's
graph does, no other forward can find it, and where nothing is found all of attention runs again.
"""

import logging
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_burst.recompute import AttentionMemory

logger = logging.getLogger(__name__)

type _Call = dict[int, AttentionMemory]  # of one checkpointed call, by the id of the attention


class Checkpoints:
    """The checkpointed calls of a model whose backward has not come yet.

    Args:
        fraction: ρ, see `recompute`.
        offload: whether what is kept goes to the host's memory.
    """

    def __init__(self, fraction: float, offload: bool) -> None:
        self._fraction, self._offload = fraction, offload
        self._calls = WeakIdKeyDictionary()
        self._current: _Call | None = None

    def begin_forward(self) -> None:
        """A model's forward begins: nothing that runs belongs to an earlier call any more."""
        self._current = None

    def enter_layer(self, hidden: Tensor) -> None:
        """A layer begins; its input says whether a checkpointed call begins with it."""
        if _starts_a_pass(hidden):
            self._current = self._call(hidden)

    def memory(self, attention: object, query: Tensor) -> AttentionMemory | None:
        """Return what carries this attention's results between the passes of the call it is in.

        None outside of checkpointed calls, and in a second pass for which nothing was kept.
        """
        # Megatron's selective recompute checkpoints attention alone.
        call = self._call(query) if _starts_a_pass(query) else self._current
        if call is None:
            return None
        if torch.is_grad_enabled():
            return call.pop(id(attention), None)
        return call.setdefault(id(attention), AttentionMemory(self._fraction, self._offload))

    def _call(self, saved: Tensor) -> _Call | None:
        """Return the call whose checkpoint saves this tensor; None if it is no second pass."""
        storage = saved.untyped_storage()
        if torch.is_grad_enabled():
            return self._calls.get(storage)
        call: _Call = {}
        self._calls[storage] = call
        return call


class RecomputeHooks:
    """A pre-wrap hook of Megatron's model builders that tells `Checkpoints` which layer runs."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the layers of all pipeline stages among `models` and return them."""
        for model in models:
            model.register_forward_pre_hook(lambda *_: self._checkpoints.begin_forward())
            for layer in model.decoder.layers if isinstance(model, GPTModel) else ():
                layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        return models

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._checkpoints.enter_layer(args[0] if args else kwargs["hidden_states"])


def _starts_a_pass(x: Tensor) -> bool:
    """Whether a checkpoint has saved `x`, or a detached alias of it is where a second pass begins.

    Further inside a first pass nothing requires a gradient, and inside a second nothing is a leaf.
    """
    return x.requires_grad and (x.is_leaf or not torch.is_grad_enabled())
