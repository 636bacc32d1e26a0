"""Hooks around the calls of a model, which are its forward or a plan of Megatron's schedule.

Under --overlap-moe-expert-parallel-comm Megatron's loop asks a model for a plan, with the arguments
of its forward, and runs the plan's nodes. A layer is four of them: attention, norm and router; the
dispatch of tokens; MLP or experts; the combine. A micro-batch's are run between those of another's
backward, so that attention's forward and backward take turns, on one stream, while tokens go to
experts on another.

No forward of the model, of its block or of a layer runs then, nor a hook of these; what they
consist of is called as ever. One plan of a model at a time is between its arguments and its output.
"""

import inspect
from collections.abc import Callable
from typing import Any

type Given = dict[str, Any]  # the arguments of a call, by their names
type Before = Callable[[Any, Given], Given | None]
type After = Callable[[Any, Given, Any], Any]


def before_calls(model: Any, hook: Before) -> None:
    """Call `hook(model, given)` before each call; it may return other arguments."""

    def before(_: Any, args: tuple[Any, ...], kwargs: Given) -> tuple[tuple[()], Given] | None:
        changed = hook(model, _by_name(model.forward, args, kwargs))
        return None if changed is None else ((), changed)

    model.register_forward_pre_hook(before, with_kwargs=True)
    if plans := _plans_of(model):
        plans.before.append(hook)


def after_calls(model: Any, hook: After, *, always_call: bool = False) -> None:
    """Call `hook(model, given, output)` after each call; it may return another output.

    `always_call`: a forward that fails ends with it, too.
    """

    def after(_: Any, args: tuple[Any, ...], kwargs: Given, output: Any) -> Any:
        return hook(model, _by_name(model.forward, args, kwargs), output)

    model.register_forward_hook(after, with_kwargs=True, always_call=always_call)
    if plans := _plans_of(model):
        plans.after.append(hook)


class _Plans:
    """Stands in for `build_schedule_plan` of one model."""

    def __init__(self, model: Any) -> None:
        self._model, self._build = model, model.build_schedule_plan
        self.before: list[Before] = []
        self.after: list[After] = []
        model.build_schedule_plan = self.build

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Return Megatron's plan of other arguments, whose last node makes another output."""
        model, given = self._model, _by_name(self._build, args, kwargs)
        for before in self.before:
            given = before(model, given) or given
        plan = self._build(**given)
        node = _last_node(plan)
        run = node.forward_func

        def run_and_end(*inputs: Any) -> Any:
            output = run(*inputs)
            for after in self.after:
                changed = after(model, given, output)
                output = output if changed is None else changed
            return output

        node.forward_func = run_and_end
        return plan


def _by_name(function: Any, args: tuple[Any, ...], kwargs: Given) -> Given:
    return dict(inspect.signature(function).bind_partial(*args, **kwargs).arguments)


def _plans_of(model: Any) -> _Plans | None:
    """Return what stands in for the method, from now on; None where the model has none."""
    build = getattr(model, "build_schedule_plan", None)
    if build is None:  # a HybridModel of 0.19
        return None
    plans = getattr(build, "__self__", None)
    return plans if isinstance(plans, _Plans) else _Plans(model)


def _last_node(plan: Any) -> Any:
    """Return the node that makes the output of a stage; those that do nothing have no function."""
    nodes = [plan.post_process]
    if number := plan.num_layers():
        layer = plan.get_layer(number - 1)
        nodes += layer.mtp_post_process, layer.moe_combine, layer.mlp
    nodes.append(plan.pre_process)
    return next(node for node in nodes if hasattr(node, "forward_func"))
