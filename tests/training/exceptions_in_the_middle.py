"""Trains, but each micro-batch is tried before, and an exception ends it there; run by tests.

In a layer's MLP and behind its attention, in the forward and in the backward. What is checked by
itself: no hook is left on, and nothing in the host's memory.
"""

import gc
from collections import Counter
from typing import Any

import torch
from torch import nn


def main() -> None:
    from megatron_burst import pretrain_gpt
    from megatron_burst.plugin import attach, pretraining
    from megatron_burst.transport.host import PinnedBuffers

    models: list[Any] = []
    counted: Counter[str] = Counter()
    next_batch, hooks = pretraining._next_batch, attach._hooks
    take, give = PinnedBuffers.take, PinnedBuffers.give

    def tried_before(*given: Any) -> Any:
        batch = next_batch(*given)
        layer = models[0].decoder.layers[-1]
        for module in (layer.mlp.linear_fc2, layer.self_attention.linear_proj):
            for backward in (False, True):
                _fail(models[0], module, batch, backward=backward)
                counted["failed"] += 1
                gc.collect()
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
                assert counted["taken"] == counted["given"], counted
        return batch

    def taken(buffers: Any, nbytes: int) -> Any:
        counted["taken"] += 1
        return take(buffers, nbytes)

    def given_back(buffers: Any, these: Any) -> None:
        counted["given"] += len(these)
        give(buffers, these)

    pretraining._next_batch, PinnedBuffers.take = tried_before, taken
    PinnedBuffers.give = given_back
    attach._hooks = lambda *given: [*hooks(*given), lambda made: models.extend(made) or made]
    pretrain_gpt.main()
    print("failed:", counted["failed"], "left:", counted["taken"] - counted["given"])


def _fail(model: Any, module: nn.Module, batch: Any, *, backward: bool) -> None:
    """Run a micro-batch until a module is called, and take back what the gradients have summed."""

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    before = {weight: weight.main_grad.clone() for weight in model.parameters()}
    hooks = [] if backward else [module.register_forward_hook(fail)]
    try:
        losses = model(
            batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
        )
        hooks.append(module.register_forward_hook(fail))
        losses.sum().backward()
    except RuntimeError as error:
        assert str(error) == "planted"
    else:
        raise AssertionError("nothing failed")
    for hook in hooks:
        hook.remove()
    for weight, summed in before.items():
        weight.grad, weight.grad_added_to_main_grad = None, False
        weight.main_grad.copy_(summed)
