"""What Megatron's recompute saves, the inputs of layers, in the host's memory.

A checkpoint saves its input by autograd, whose hooks for saved tensors hand it over here and take
it back. They stand around the forward of the layers, in which nothing else that is large is saved.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_burst.plugin.attention.recompute import Checkpoints, nothing, starts_a_pass
from megatron_burst.plugin.models import mtp_layers
from megatron_burst.plugin.row_chunks import is_in_backward
from megatron_burst.transport.host import HostMemory, Stored


class OffloadInputs:
    """A pre-wrap hook of Megatron's model builders: inputs of checkpoints go to the host's memory.

    Each leaves behind its checkpoint's forward. In the backward one comes back while the layer
    behind it differentiates what is before its attention: earlier it would stand beside what
    attention needs there, the most of a layer. In a checkpoint without attention it comes at once.

    Args:
        checkpoints: what finds attention's results by the storage of that input; None: nothing.
    """

    def __init__(self, checkpoints: Checkpoints | None) -> None:
        self._checkpoints, self._host = checkpoints, HostMemory()
        self._inputs: list[Callable[[], Any]] = []  # weak: of checkpoints whose forward runs
        self._last: Callable[[], _Input | None] = nothing  # of this forward, weak
        self._next: Callable[[], _Input | None] = nothing  # to come back, weak
        self._comes_later = False  # behind the attention of this second pass
        self._hooks: list[saved_tensors_hooks] = []
        self._is_paused = False

    def __call__(self, models: list[Any]) -> list[Any]:
        """Attach to the pipeline stages of a model and return them."""
        for model in models:
            model.register_forward_pre_hook(self._begin_forward)
            for part in (model.decoder, getattr(model, "mtp", None)):
                if part is not None:
                    part.register_forward_pre_hook(self._enter)
                    part.register_forward_hook(self._leave, always_call=True)
            # An MTP layer's norms see first what its checkpoint saves.
            heads = mtp_layers(model)
            norms = (norm for layer in heads for norm in (layer.enorm, layer.hnorm))
            for layer in (*model.decoder.layers, *heads):
                layer.register_forward_hook(self._resume, always_call=True)
            for module in (*model.decoder.layers, *norms):
                module.register_forward_pre_hook(self._see, with_kwargs=True)
                if (attention := _attention(module)) is not None:
                    attention.register_forward_pre_hook(self._attend)
        return models

    def _begin_forward(self, *_: Any) -> None:
        self._last = nothing
        self._inputs.clear()

    def _enter(self, *_: Any) -> None:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.append(hooks)
        hooks.__enter__()

    def _leave(self, part: Any, _: Any, output: Any) -> None:
        self._hooks.pop().__exit__()
        self._inputs.clear()
        if output is None:  # an exception ends the forward
            self._host.settle()
            for module in part.modules():  # Megatron keeps an MLP's residual there, and its graph
                if getattr(module, "mlp_norm_manager", None) is not None:
                    module.mlp_norm_manager = None

    def _see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins that may be the first of a checkpoint."""
        if is_in_backward() and _attention(module) is None and not self._comes_later:
            self._fetch()
        hidden = args[0] if args else kwargs["hidden_states"]
        if starts_a_pass(hidden) and not torch.is_grad_enabled():
            self._inputs.append(weakref.ref(hidden))
        elif torch.is_grad_enabled() and not is_in_backward():
            self._pause()

    def _pause(self) -> None:
        """Let a layer in no checkpoint save as ever: linears look for `main_grad` at a weight."""
        if self._hooks:
            self._hooks.pop().__exit__()
            self._is_paused = True

    def _resume(self, *_: Any) -> None:
        if self._is_paused:
            self._is_paused = False
            self._enter()

    def _attend(self, _: Any, args: tuple[Any, ...]) -> None:
        """Attention begins; when its backward has made the queries' gradient, it holds no more."""
        query = args[0]
        if is_in_backward() and query.requires_grad:
            query.register_hook(lambda _: self._fetch())
            self._comes_later = True

    def _fetch(self) -> None:
        before, self._next = self._next(), nothing
        if before is not None:
            before.stored.fetch()

    def _pack(self, x: Tensor) -> "Tensor | _Input":
        """Take what autograd saves; all but inputs of checkpoints stays where it is."""
        if all(seen() is not x for seen in self._inputs):
            return x.detach()  # what a node saves of its own output would keep the node
        saved = _Input(self._host.store(x.detach()), self._last)
        if self._checkpoints is not None:
            saved.moved = self._checkpoints.mover(x.untyped_storage())
        self._last = weakref.ref(saved)
        return saved

    def _unpack(self, saved: "Tensor | _Input") -> Tensor:
        """Return it for the second pass."""
        if not isinstance(saved, _Input):
            return saved
        self._next, self._comes_later = saved.before, False
        (x,) = saved.stored.recall()
        saved.moved(x.untyped_storage())
        return x


class _Input:
    """The input of a checkpoint; the graph holds it."""

    def __init__(self, stored: Stored, before: "Callable[[], _Input | None]") -> None:
        self.stored, self.before = stored, before
        self.moved: Callable[[torch.UntypedStorage], None] = lambda _: None


def _attention(layer: Any) -> Any:
    """Return the attention of a layer, or None: of no other mixer."""
    return getattr(getattr(layer, "self_attention", None), "core_attention", None)
