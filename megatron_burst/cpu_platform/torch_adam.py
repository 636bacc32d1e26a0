"""What Megatron's distributed optimizers save and load wrongly.

With --dist-ckpt-optim-fully-reshardable what lies behind a bucket that was padded: 0.19 and dev
(d48bd6be) gather the buckets without their padding, and read parameters where they lie with it, so
that the weights which are loaded are moved.

And torch's Adam, which is there without Apex and TE. Its `step` is a tensor in the state of every
parameter, where the others have one for a group, and the checkpoint code stumbles over that:
- it asserts that all parameters share one `step` before it reads a checkpoint, when Adam has no
  state yet. Megatron's `init_state_fn` makes the moments alone and is not called there;
- it takes `step` for a shard of the parameter like the moments: `dp_reshardable` reads back a wrong
  number, `fully_reshardable` ends with a KeyError;
- it loads one `step` tensor for all parameters, to which Adam then adds once a parameter;
- it writes into float32 shards, views of parameters, in place, which autograd refuses;
- under Megatron-FSDP a rank skips parameters of which it has no part, and one rank's `step` is
  saved for all; and to have moments to load it takes a step without gradients, which stays where
  --load has no checkpoint yet: `step` is one too many, and weights have decayed once.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def with_torch_adam(build_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """`get_megatron_optimizer` whose distributed optimizers save and load rightly.

    No hook of Megatron lies between building the optimizer and reading the checkpoint.
    """

    @functools.wraps(build_optimizer)
    def build(*args: Any, **kwargs: Any) -> Any:
        optimizer = build_optimizer(*args, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if not hasattr(part, "load_parameter_state_from_dp_reshardable"):
                continue
            _gather_padding(part)
            if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
                _mend(part)
        return optimizer

    return build


def _gather_padding(distributed: Any) -> None:
    """Let `sharded_param_state_fully_reshardable` gather where it reads: padding, too."""
    save = distributed.sharded_param_state_fully_reshardable

    @functools.wraps(save)
    def save_all(*args: Any, **kwargs: Any) -> Any:
        parts = [part for buffer in distributed.buffers for part in (buffer, *buffer.buckets)]
        sizes = [part.numel_unpadded for part in parts]
        for part in parts:
            part.numel_unpadded = part.grad_data.numel()
        try:
            return save(*args, **kwargs)
        finally:
            for part, size in zip(parts, sizes, strict=True):
                part.numel_unpadded = size

    distributed.sharded_param_state_fully_reshardable = save_all


def _mend(distributed: Any) -> None:
    initialise_adam_state(distributed.optimizer)
    distributed._init_optimizer_states_with_dummy_values = lambda: None  # they are there
    distributed.optimizer.register_load_state_dict_post_hook(give_each_parameter_its_step)
    if distributed.ddp_config.use_megatron_fsdp:
        distributed.optimizer.register_step_post_hook(count_steps_together)
    read_shards = distributed._get_main_param_and_optimizer_states
    write_shards = distributed._set_main_param_and_optimizer_states

    def read_without_step(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        return {name: shard for name, shard in read_shards(parameter).items() if name != "step"}

    def write_without_step(parameter: torch.nn.Parameter, shards: dict[str, Any]) -> None:
        write_shards(parameter, {**shards, "step": None})  # None: keep the one that is there

    distributed._get_main_param_and_optimizer_states = read_without_step
    distributed._set_main_param_and_optimizer_states = write_without_step
    for name in ("load_state_dict", "load_parameter_state"):
        setattr(distributed, name, torch.no_grad()(getattr(distributed, name)))


def initialise_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without state what torch's Adam makes in its first step, at step 0.

    Training afterwards equals training without this call; the memory is taken a step earlier.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def give_each_parameter_its_step(optimizer: torch.optim.Optimizer) -> None:
    """Copy every parameter's `step`, so that no two parameters share one tensor."""
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()


def count_steps_together(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give every parameter the largest `step` of all, those without a gradient, too."""
    latest = max(float(state["step"]) for state in optimizer.state.values())
    for state in optimizer.state.values():
        state["step"].fill_(latest)
