"""Finds, in the second pass of a checkpointed layer, what attention saved in the first.

Megatron runs a checkpointed function twice and says to nobody which second pass belongs to which
first. But the checkpoint saves its input: the second pass starts from a detached alias of it, in
the same storage. What is saved hangs on that storage, weakly: it lives as long as the forward's
graph does, no other forward can find it, and where nothing is found all of attention is recomputed.
That is so, too, where two calls save the same storage, for then nobody could tell them apart.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from megatron_burst.attention.saved import AttentionMemory
from megatron_burst.plugin.calls import before_calls
from megatron_burst.plugin.models import LanguageModel
from megatron_burst.transport.host import HostMemory


class _Call(dict[int, AttentionMemory | None]):
    """What each attention of a checkpointed call keeps, by its id, in their order."""

    def __init__(self, before: Callable[[], "_Call | None"]) -> None:
        super().__init__()
        self._before = before  # weak

    def first(self) -> AttentionMemory | None:
        """Return what the next second pass will want: of this call, or of the one before."""
        call: _Call | None = self
        while call is not None:
            for memory in call.values():
                if memory is not None:
                    return memory
            call = call._before()
        return None


def nothing() -> None:
    """Stand in for a weak reference."""


class Checkpoints:
    """The checkpointed calls of a model whose backward has not come yet.

    Args:
        fraction: ρ, see `recompute`.
        offload: whether what is saved goes to the host's memory.
    """

    def __init__(self, fraction: float, offload: bool) -> None:
        self._fraction, self._host = fraction, HostMemory() if offload else None
        self._calls = WeakIdKeyDictionary()  # by storage; None where two calls saved it
        self._current: Callable[[], Any] = nothing  # what the current call's checkpoint saves
        self._left: Callable[[], Any] = nothing  # what the last layer returned
        self._node: int | None = None  # of the graph, which made that
        self._is_second = False  # the pass in which the current call is
        self._last: Callable[[], Any] = nothing  # the call that began last in this forward

    def begin_forward(self, *_: Any) -> None:
        """A model's forward or its MTP begins: what runs belongs to no earlier call any more."""
        self._current = self._last = nothing

    def enter_layer(self, hidden: Tensor) -> None:
        """A layer begins; its input says whether a checkpointed call begins or goes on with it."""
        storage, again = hidden.untyped_storage(), torch.is_grad_enabled()
        # A checkpoint that ends becomes the node of what its last layer returned.
        goes_on = self._left() is storage and self._node == _node(hidden)
        if starts_a_pass(hidden) and (again or not goes_on):
            self._begin(storage)
            self._current, self._is_second = WeakIdRef(storage), again
        elif not goes_on:
            self._current = nothing

    def leave_layer(self, hidden: Tensor) -> None:
        """A layer ends; the next one of the same call begins with what it returned."""
        self._left, self._node = WeakIdRef(hidden.untyped_storage()), _node(hidden)

    def memory(self, attention: object, query: Tensor) -> AttentionMemory | None:
        """Return what carries this attention's results between the passes of the call it is in.

        None outside of checkpointed calls, and in a second pass for which nothing was saved.
        """
        again = torch.is_grad_enabled()
        storage = self._current() if self._is_second == again else None
        if starts_a_pass(query):  # Megatron's selective recompute checkpoints attention alone
            storage = query.untyped_storage()
            self._begin(storage)
        call: _Call | None = None if storage is None else self._calls.get(storage)
        if call is None:
            return None
        if again:
            memory = call.pop(id(attention), None)
            for wanted in (memory, call.first()):  # the other one while this layer runs
                if wanted is not None:
                    wanted.fetch()
            return memory
        twice = id(attention) in call  # a shared layer: which of them the second pass is in?
        call[id(attention)] = None if twice else AttentionMemory(self._fraction, self._host)
        return call[id(attention)]

    def mover(self, storage: torch.UntypedStorage) -> Callable[[torch.UntypedStorage], None]:
        """Return what says in which storage a checkpoint's input came back that was in this one."""
        call = self._calls.get(storage)

        def moved(back: torch.UntypedStorage) -> None:
            if call is not None:
                self._calls[back] = call

        return moved

    def _begin(self, storage: torch.UntypedStorage) -> None:
        """A pass begins; the first one's call is new."""
        if not torch.is_grad_enabled():
            call = None if storage in self._calls else _Call(self._last)
            self._calls[storage] = call
            self._last = nothing if call is None else weakref.ref(call)


class RecomputeHooks:
    """A pre-wrap hook of Megatron's model builders that tells `Checkpoints` which layer runs."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the pipeline stages of a model and return them."""
        for model in models:
            before_calls(model, self._checkpoints.begin_forward)
            if (mtp := getattr(model, "mtp", None)) is not None:  # whose layers keep nothing
                mtp.register_forward_pre_hook(self._checkpoints.begin_forward)
            for layer in model.decoder.layers if isinstance(model, LanguageModel) else ():
                layer.register_forward_pre_hook(self._enter, with_kwargs=True)
                layer.register_forward_hook(self._leave)
        return models

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._checkpoints.enter_layer(args[0] if args else kwargs["hidden_states"])

    def _leave(self, _: Any, args: Any, output: Tensor | tuple[Tensor, Any]) -> None:
        self._checkpoints.leave_layer(output[0] if isinstance(output, tuple) else output)


def starts_a_pass(x: Tensor) -> bool:
    """Whether a checkpoint has saved `x`, or a detached alias of it is where a second pass begins.

    Inside a first pass layers of Megatron return what requires a gradient, too, for they enable
    them for a sum; nothing else there does, and inside a second nothing is a leaf.
    """
    return x.requires_grad and (x.is_leaf or not torch.is_grad_enabled())


def _node(x: Tensor) -> int | None:
    return None if x.grad_fn is None else x.grad_fn._sequence_nr()
